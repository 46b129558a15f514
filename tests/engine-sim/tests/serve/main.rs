//! A running engine, over its sockets.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod client;
mod events;
mod faults;
mod generate;
mod ranks;
mod sglang;
mod trtllm;
