//! Who asks, and how much may be asked: keys, rates, requests at a time.
//!
//! **Invariant:** over any time `t` an account lets in at most `burst + rate × t` of what it limits; what is given back was taken before.
//! **Invariant:** a request is let in by all of its accounts or charged to none.

pub mod account;
pub mod bucket;
pub mod keys;

pub use account::{Account, Exceeded, Level, Limit, Limits, Standing, charge, enter};
pub use bucket::{Bucket, Rate, Wait};
pub use keys::{Digest, Keyring, TwiceGiven};

#[cfg(test)]
mod tests;
