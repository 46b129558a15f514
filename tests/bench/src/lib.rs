//! Figures: the demo's comparison and the CPU bench, on the real programs.

pub mod measure;
pub mod report;
