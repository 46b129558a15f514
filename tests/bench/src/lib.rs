//! Figures: the demo's comparison and the CPU bench, on the real programs.

pub mod fleet;
pub mod measure;
pub mod report;
pub mod soak;
