//! What the balancer must know of an image, video or sound without an engine: its identity, its size and how many tokens it fills.
//!
//! Pure: no clock, socket, environment or random number; no pixel is decoded.
//! **Invariant:** no function panics, loops without bound or allocates by a number found in a file: all work is linear in the bytes given.

pub mod container;
pub mod data_url;
pub mod estimate;
pub mod expand;
pub mod family;
pub mod header;
pub mod identity;
