//! Our block pool and prompts, held to captures of a real vLLM.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod blocks;
mod prompts;
mod support;
