//! vLLM's block hash: `H((parent, tokens, extra))`, chained on full digests.
//!
//! Mirrors `vllm/v1/core/kv_cache_utils.py` and `vllm/utils/hashing.py` of vLLM 0.32. Two algorithms:
//! `sha256` hashes the value as Python's pickle protocol 5 writes it, `sha256_cbor` as canonical CBOR.
//! **Invariant:** shares no code with `fovea-kv`, so that each can catch the other's mistakes.

use crate::events::HashForm;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;

/// Full digest of a block; what vLLM chains. Events may carry only its low 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The low 64 bits, as events carry them by default.
    pub fn low64(&self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// As events carry it, in JSON: an integer, or hex.
    pub fn published(&self, form: HashForm) -> serde_json::Value {
        match form {
            HashForm::Int => self.low64().into(),
            HashForm::Bytes => self.hex().into(),
        }
    }

    /// All 32 bytes as lower-case hex.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Algorithm {
    /// SHA-256 of pickle protocol 5: vLLM's default.
    Sha256,
    /// SHA-256 of canonical CBOR.
    Sha256Cbor,
}

impl Algorithm {
    /// vLLM's name, as its metrics show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha256Cbor => "sha256_cbor",
        }
    }
}

/// What, besides tokens, makes a block's KV differ. In the order of vLLM: LoRA, media, salt, embeddings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// LoRA adapter: its name, and its path as given at start (hashed but not published).
    Lora { name: String, path: String },
    /// Media item and where it starts, relative to the block's first token (negative: in an earlier block).
    Media { id: String, offset: i64 },
    /// `cache_salt` of the request, first block only.
    Salt(String),
    /// Digest of prompt embeddings over this block.
    Embeds(Vec<u8>),
}

/// The values that are hashed, a small subset of Python's.
enum Value<'a> {
    None,
    Int(i64),
    Bytes(&'a [u8]),
    Text(&'a str),
    /// A literal of vLLM's source: one object however often it occurs, which pickle shows.
    Literal(&'static str),
    Tuple(Vec<Value<'a>>),
}

/// Computes block hashes with one algorithm.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    algorithm: Algorithm,
    /// Stands in for the parent of a first block.
    none: Digest,
}

impl BlockHasher {
    /// A hasher whose `NONE_HASH` is vLLM's (`PYTHONHASHSEED` unset).
    pub fn new(algorithm: Algorithm) -> Self {
        Self { algorithm, none: digest(algorithm, &Value::Literal("vllm-none-hash")) }
    }

    /// The algorithm.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The parent of a first block.
    pub fn none_hash(&self) -> Digest {
        self.none
    }

    /// Hash of one full block.
    pub fn block(&self, parent: Option<Digest>, tokens: &[u32], extra: &[ExtraKey]) -> Digest {
        let parent = parent.unwrap_or(self.none);
        let tokens = Value::Tuple(tokens.iter().map(|token| Value::Int(i64::from(*token))).collect());
        let extra = if extra.is_empty() { Value::None } else { Value::Tuple(extra.iter().map(tagged).collect()) };
        digest(self.algorithm, &Value::Tuple(vec![Value::Bytes(&parent.0), tokens, extra]))
    }
}

fn tagged(key: &ExtraKey) -> Value<'_> {
    Value::Tuple(match key {
        ExtraKey::Lora { name, path } => vec![Value::Literal("lora"), Value::Text(name), Value::Text(path)],
        ExtraKey::Media { id, offset } => vec![Value::Literal("mm"), Value::Text(id), Value::Int(*offset)],
        ExtraKey::Salt(salt) => vec![Value::Literal("cache_salt"), Value::Text(salt)],
        ExtraKey::Embeds(bytes) => vec![Value::Literal("prompt_embeds"), Value::Bytes(bytes)],
    })
}

fn digest(algorithm: Algorithm, value: &Value) -> Digest {
    let bytes = match algorithm {
        Algorithm::Sha256 => pickle(value),
        Algorithm::Sha256Cbor => {
            let mut out = Vec::new();
            cbor(value, &mut out);
            out
        }
    };
    Digest(Sha256::digest(&bytes).into())
}

/// Canonical CBOR (RFC 8949): shortest heads, definite lengths.
fn cbor(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::None => out.push(0xf6),
        Value::Int(n) if *n < 0 => cbor_head(1, n.unsigned_abs() - 1, out),
        Value::Int(n) => cbor_head(0, n.unsigned_abs(), out),
        Value::Bytes(bytes) => {
            cbor_head(2, bytes.len() as u64, out);
            out.extend_from_slice(bytes);
        }
        Value::Text(text) => cbor_text(text, out),
        Value::Literal(text) => cbor_text(text, out),
        Value::Tuple(items) => {
            cbor_head(4, items.len() as u64, out);
            items.iter().for_each(|item| cbor(item, out));
        }
    }
}

fn cbor_text(text: &str, out: &mut Vec<u8>) {
    cbor_head(3, text.len() as u64, out);
    out.extend_from_slice(text.as_bytes());
}

fn cbor_head(major: u8, n: u64, out: &mut Vec<u8>) {
    let major = major << 5;
    let bytes = n.to_be_bytes();
    match n {
        0..=23 => out.push(major | bytes[7]),
        24..=0xff => out.extend_from_slice(&[major | 24, bytes[7]]),
        0x100..=0xffff => out.extend_from_slice(&[major | 25, bytes[6], bytes[7]]),
        0x1_0000..=0xffff_ffff => {
            out.push(major | 26);
            out.extend_from_slice(&bytes[4..]);
        }
        _ => {
            out.push(major | 27);
            out.extend_from_slice(&bytes);
        }
    }
}

/// CPython's C pickler, protocol 5, for a payload of one frame (< 64 KiB, as every block is).
fn pickle(value: &Value) -> Vec<u8> {
    let mut pickler = Pickler::default();
    pickler.save(value);
    pickler.out.push(b'.');
    let mut bytes = vec![0x80, 5, 0x95];
    bytes.extend_from_slice(&(pickler.out.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&pickler.out);
    bytes
}

#[derive(Default)]
struct Pickler<'a> {
    out: Vec<u8>,
    memoized: u32,
    /// Memo index of each object that can occur twice by identity.
    shared: HashMap<&'a str, u32>,
}

impl<'a> Pickler<'a> {
    fn save(&mut self, value: &Value<'a>) {
        match value {
            Value::None => self.out.push(b'N'),
            Value::Int(n) => self.int(*n),
            Value::Bytes(bytes) => {
                self.sized([b'C', b'B'], bytes);
                self.memoize();
            }
            Value::Text(text) => self.text(text, is_singleton(text)),
            Value::Literal(text) => self.text(text, true),
            Value::Tuple(items) => self.tuple(items),
        }
    }

    fn int(&mut self, n: i64) {
        if let Ok(n) = u8::try_from(n) {
            self.out.extend_from_slice(&[b'K', n]);
        } else if let Ok(n) = u16::try_from(n) {
            self.out.push(b'M');
            self.out.extend_from_slice(&n.to_le_bytes());
        } else if let Ok(n) = i32::try_from(n) {
            self.out.push(b'J');
            self.out.extend_from_slice(&n.to_le_bytes());
        } else {
            // LONG1: the shortest two's complement, little-endian.
            let bytes = n.to_le_bytes();
            let fill = if n < 0 { 0xff } else { 0 };
            let mut length = bytes.len();
            while length > 1 && bytes[length - 1] == fill && (bytes[length - 2] ^ fill) & 0x80 == 0 {
                length -= 1;
            }
            self.out.extend_from_slice(&[0x8a, bytes[..length].len().to_le_bytes()[0]]);
            self.out.extend_from_slice(&bytes[..length]);
        }
    }

    /// `short` opcode with a one-byte length, or `long` with four.
    fn sized(&mut self, [short, long]: [u8; 2], bytes: &[u8]) {
        if let Ok(length) = u8::try_from(bytes.len()) {
            self.out.extend_from_slice(&[short, length]);
        } else {
            self.out.push(long);
            self.out.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        }
        self.out.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &'a str, shared: bool) {
        if let Some(index) = self.shared.get(text).filter(|_| shared) {
            match u8::try_from(*index) {
                Ok(index) => self.out.extend_from_slice(&[b'h', index]),
                Err(_) => {
                    self.out.push(b'j');
                    self.out.extend_from_slice(&index.to_le_bytes());
                }
            }
            return;
        }
        self.sized([0x8c, b'X'], text.as_bytes());
        if shared {
            self.shared.insert(text, self.memoized);
        }
        self.memoize();
    }

    fn tuple(&mut self, items: &[Value<'a>]) {
        if items.is_empty() {
            self.out.push(b')');
            return;
        }
        if items.len() > 3 {
            self.out.push(b'(');
        }
        items.iter().for_each(|item| self.save(item));
        self.out.push(match items.len() {
            1 => 0x85,
            2 => 0x86,
            3 => 0x87,
            _ => b't',
        });
        self.memoize();
    }

    fn memoize(&mut self) {
        self.out.push(0x94);
        self.memoized += 1;
    }
}

/// CPython keeps one object for the empty string and for each Latin-1 character.
fn is_singleton(text: &str) -> bool {
    let mut chars = text.chars();
    match (chars.next(), chars.next()) {
        (None, _) => true,
        (Some(c), None) => u32::from(c) < 256,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_none_hash(algorithm: Algorithm, expect: &str) {
        assert_eq!(BlockHasher::new(algorithm).none_hash().hex(), expect);
    }

    #[test]
    fn none_hash_is_that_of_vllm() {
        check_none_hash(Algorithm::Sha256Cbor, "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
        check_none_hash(Algorithm::Sha256, "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198");
    }

    #[test]
    fn cbor_form_is_canonical() {
        let mut out = Vec::new();
        let tokens = [1, 23, 24, 300, 70000].map(Value::Int);
        cbor(
            &Value::Tuple(vec![Value::Bytes(&[7]), Value::Tuple(tokens.into()), Value::Int(-16), Value::None]),
            &mut out,
        );
        let hex: String = out.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "844107850117181819012c1a000111702ff6");
    }
}
