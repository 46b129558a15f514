//! Custom vision encoders: any author's encoder in front of a stock engine.
//!
//! A backend turns images into rows of embeddings; the batcher feeds it; a hand-off puts the rows where the engine takes them.

pub mod backend;
pub mod batch;
pub mod cache;
pub mod error;
pub mod format;
pub mod handoff;
pub mod passthrough;
pub mod python;
pub mod service;
pub mod tensor;
