//! What a sidecar and a balancer say to each other: messages, codec, and the state machines at both ends.
//!
//! Pure: sockets and clocks live in the shells. One ordered stream per (sidecar, balancer), dialled by the sidecar;
//! `docs/protocols/block-stream.md` is the reference of the bytes, `docs/protocols/preamble.md` of the request record.

pub mod audit;
pub mod auth;
pub mod codec;
pub mod embeddings;
pub mod inbox;
pub mod message;
pub mod model_files;
pub mod outbox;
pub mod preamble;
