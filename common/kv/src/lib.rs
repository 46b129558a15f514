//! Ids, hashes and wire events of KV caches: the one language sidecar and balancer share.
//!
//! Pure: no clock, socket, environment or random number. Hashes and view are `docs/architecture.md`, "Routing view and hashes".

pub mod event;
mod hash;
mod ids;
pub mod regroup;
pub mod replica;
pub mod sglang;
pub mod sums;
pub mod trtllm;
mod view;
pub mod vllm;
mod wire;

pub use hash::{BlockHasher, chain, root};
pub use ids::{BlockHash, BlockSize, EngineHash, MediaId, MediaKey, SequenceHash, Tier};
pub use view::{MediaSpan, RoutingView, Run};
