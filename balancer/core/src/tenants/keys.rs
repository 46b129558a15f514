//! API keys by their digests, looked up in a time that tells nothing of them.

use std::collections::HashMap;

use subtle::{ConditionallySelectable, ConstantTimeEq};

/// SHA-256 of a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl std::fmt::Debug for Digest {
    /// No more than tells two apart.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Digest({:02x}{:02x}…)", self.0[0], self.0[1])
    }
}

impl Digest {
    /// From 64 hex digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digit = |at: usize| char::from(text.as_bytes()[at]).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let mut bytes = [0; 32];
        if text.len() != 64 {
            return None;
        }
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = digit(2 * at)? << 4 | digit(2 * at + 1)?;
        }
        Some(Self(bytes))
    }

    fn words(&self) -> [u64; 4] {
        let (words, _) = self.0.as_chunks::<8>();
        std::array::from_fn(|at| u64::from_le_bytes(words[at]))
    }
}

/// The same key stands twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the same key is given twice")]
pub struct TwiceGiven {
    /// Places in the list given.
    pub first: usize,
    pub second: usize,
}

/// Keys in a fixed order.
#[derive(Clone, Debug, Default)]
pub struct Keyring {
    keys: Vec<[u64; 4]>,
}

impl Keyring {
    /// # Errors
    /// A key that stands twice would be of one owner by chance.
    pub fn new(digests: &[Digest]) -> Result<Self, TwiceGiven> {
        let mut seen = HashMap::with_capacity(digests.len());
        for (second, digest) in digests.iter().enumerate() {
            if let Some(first) = seen.insert(*digest, second) {
                return Err(TwiceGiven { first, second });
            }
        }
        Ok(Self { keys: digests.iter().map(Digest::words).collect() })
    }

    /// The place of a key. Looks at all keys, always: O(keys), some nanoseconds each.
    pub fn find(&self, digest: &Digest) -> Option<usize> {
        let wanted = digest.words();
        let mut found = u32::MAX;
        for (at, key) in (0_u32..).zip(&self.keys) {
            found.conditional_assign(&at, key.ct_eq(&wanted));
        }
        usize::try_from(found).ok().filter(|at| *at < self.keys.len())
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}
