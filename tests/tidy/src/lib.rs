//! The rules of the source tree, held by tests (`cargo test -p tidy`): arrows between crates, purity, sizes, documented names.
//!
//! There is nothing to import here.
