//! The part of the OpenAI-compatible API we look into: a borrowed scan of a chat or completion body.
//!
//! The body stays what the client sent. A scan says where things stand in it (byte offsets), borrows the media URLs, and builds
//! values only for what a chat template reads. Mirrors how vLLM 0.32–0.33 reads messages and content parts.
//!
//! **Invariant:** media data is never copied (unless its JSON string has escapes) and never enters a DOM.
//! **Invariant:** no input panics; nesting, and with it recursion, is bounded.
//! **Invariant:** in an object that we look into (the body, a message, a content part, its media, `vllm_xargs`) a key may stand only
//! once. Engines take the last of two; refusing keeps balancer, sidecar and engine from reading different requests out of one
//! body. In values that only the template reads, the last one counts, as in engines.

mod chat;
mod completion;
mod cut;
pub mod edit;
mod error;
mod guard;
mod json;
mod message;
mod part;
mod scan;
mod top;

pub use chat::ChatRequest;
pub use completion::{CompletionRequest, Prompt};
pub use cut::CutPolicy;
pub use error::ParseError;
pub use guard::Hazard;
pub use part::{MediaKind, MediaPart};
pub use scan::{Scan, scan};
pub use top::{Common, Streaming};
