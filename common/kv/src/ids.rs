//! Newtypes of every identity that travels: two kinds of hash must not be swappable.

use std::fmt;
use std::num::NonZeroU32;

/// Content hash of one KV block: its tokens plus the media spans over it. Says nothing of what came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// Chained hash of a block and all before it; equal ⇒ same prefix (up to a 64-bit collision). Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceHash(pub u64);

impl fmt::Display for SequenceHash {
    /// 16 lower-case hex digits, the form of every JSON output.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Identity of one image, video or audio item, as the engine keys it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MediaId(pub [u8; 32]);

impl MediaId {
    /// Identity for an engine's own id string: 64 lower-case hex digits stand for themselves, anything else is hashed.
    pub fn from_engine_id(id: &str) -> Self {
        Self::from_hex(id).unwrap_or_else(|| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(b"fovea-id").update(id.as_bytes());
            Self(*hasher.finalize().as_bytes())
        })
    }

    /// Parses exactly 64 lower-case hex digits.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let digit = |c: u8| match c {
            b'0'..=b'9' => Some(c - b'0'),
            b'a'..=b'f' => Some(c - b'a' + 10),
            _ => None,
        };
        if hex.len() != 64 {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().as_chunks::<2>().0) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for MediaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for MediaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MediaId({self})")
    }
}

/// What we call a media item before it is known how an engine keys it: its content and options, or the id of a URL under some policy.
/// Never an engine's identity; a [`MediaId`] or pad values are learnt for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MediaKey(pub [u8; 32]);

impl fmt::Display for MediaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for MediaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MediaKey({self})")
    }
}

/// An engine's own block hash, in the form it was sent. Opaque: only equality means anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineHash {
    /// vLLM's default: the low 64 bits of the digest.
    Int(u64),
    /// A whole digest of up to 32 bytes: `len` of them count, the rest are 0.
    Digest { bytes: [u8; 32], len: u8 },
}

/// Tokens per KV block, set by the engine; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    pub fn new(tokens: u32) -> Option<Self> {
        NonZeroU32::new(tokens).map(Self)
    }

    pub fn get(self) -> u32 {
        self.0.get()
    }
}

/// Where a block's KV lies. The order is the order in which an engine looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    Gpu,
    Cpu,
    Storage,
}

impl Tier {
    pub const ALL: [Self; 3] = [Self::Gpu, Self::Cpu, Self::Storage];

    /// Dense index 0..3, also the wire form.
    pub fn index(self) -> u8 {
        self as u8
    }

    pub fn from_index(index: u8) -> Option<Self> {
        Self::ALL.get(usize::from(index)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_ids_stand_for_themselves() {
        let hex = "168b523a4f7dbfc2a362cda4254c1cc29b651bc1d4a4161517b1ed5a663ce5ed";
        assert_eq!(MediaId::from_engine_id(hex).to_string(), hex);
    }

    #[test]
    fn other_ids_are_hashed() {
        let upper = "168B523A4F7DBFC2A362CDA4254C1CC29B651BC1D4A4161517B1ED5A663CE5ED";
        assert_ne!(MediaId::from_engine_id(upper).to_string(), upper.to_lowercase());
        assert_ne!(MediaId::from_engine_id(""), MediaId::from_engine_id("a"));
        assert_eq!(MediaId::from_hex(&"é".repeat(32)), None);
    }
}
