//! KV events and their msgpack form: maps in an array batch, as vLLM 0.32 sends them.

use crate::hash::{Digest, ExtraKey};
use rmp::encode::{self, ValueWriteError};

/// What happened in the block pool, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum KvEvent {
    /// Consecutive blocks became cached.
    Stored(Stored),
    /// One copy of a block left the cache.
    Removed(Digest),
    /// A block came to the CPU tier. Offloading connectors announce it by its hash alone.
    Offloaded(Digest),
    /// A block left the CPU tier.
    OffloadRemoved(Digest),
    /// The whole cache was dropped.
    Cleared,
}

/// `BlockStored`.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// In order of position.
    pub hashes: Vec<Digest>,
    /// `None` = the first of `hashes` is a first block.
    pub parent: Option<Digest>,
    /// All tokens of all blocks, placeholders expanded.
    pub tokens: Vec<u32>,
    /// Tokens per block.
    pub block_size: usize,
    /// LoRA adapter: number from 1, name.
    pub lora: Option<(u32, String)>,
    /// One entry per block; an empty one is sent as nil.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// `session_id` of the request, left out when absent.
    pub session_id: Option<String>,
}

/// How events carry a block hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum HashForm {
    /// Low 64 bits as an integer (vLLM's default).
    Int,
    /// All 32 bytes (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
    Bytes,
}

/// Encodes one batch `[ts, [event…], rank]`. `ts` is Unix time in seconds.
pub fn encode_batch(ts: f64, events: &[KvEvent], form: HashForm, rank: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    write_batch(&mut out, ts, events, form, rank).expect("writing to a Vec cannot fail");
    out
}

type Written = Result<(), ValueWriteError<std::io::Error>>;

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("bounded by the block pool, far below 2^32")
}

fn write_batch(out: &mut Vec<u8>, ts: f64, events: &[KvEvent], form: HashForm, rank: u32) -> Written {
    encode::write_array_len(out, 3)?;
    encode::write_f64(out, ts)?;
    encode::write_array_len(out, count(events.len()))?;
    for event in events {
        match event {
            KvEvent::Stored(stored) => write_stored(out, stored, form)?,
            KvEvent::Removed(hash) => write_removed(out, hash, "GPU", form)?,
            KvEvent::OffloadRemoved(hash) => write_removed(out, hash, "CPU", form)?,
            KvEvent::Offloaded(hash) => write_offloaded(out, hash, form)?,
            KvEvent::Cleared => {
                encode::write_map_len(out, 1)?;
                write_pair(out, "type", "AllBlocksCleared")?;
            }
        }
    }
    encode::write_uint(out, u64::from(rank))?;
    Ok(())
}

fn write_removed(out: &mut Vec<u8>, hash: &Digest, medium: &str, form: HashForm) -> Written {
    encode::write_map_len(out, 4)?;
    write_pair(out, "type", "BlockRemoved")?;
    encode::write_str(out, "block_hashes")?;
    encode::write_array_len(out, 1)?;
    write_hash(out, hash, form)?;
    write_pair(out, "medium", medium)?;
    encode::write_str(out, "group_idx")?;
    encode::write_uint(out, 0)?;
    Ok(())
}

/// As vLLM's offloading connector sends it: no tokens, no parent, block size 0.
fn write_offloaded(out: &mut Vec<u8>, hash: &Digest, form: HashForm) -> Written {
    encode::write_map_len(out, 8)?;
    write_pair(out, "type", "BlockStored")?;
    encode::write_str(out, "block_hashes")?;
    encode::write_array_len(out, 1)?;
    write_hash(out, hash, form)?;
    for key in ["parent_block_hash", "lora_id", "lora_name"] {
        encode::write_str(out, key)?;
        write_nil(out)?;
    }
    encode::write_str(out, "token_ids")?;
    encode::write_array_len(out, 0)?;
    encode::write_str(out, "block_size")?;
    encode::write_uint(out, 0)?;
    write_pair(out, "medium", "CPU")
}

fn write_stored(out: &mut Vec<u8>, stored: &Stored, form: HashForm) -> Written {
    encode::write_map_len(out, 11 + u32::from(stored.session_id.is_some()))?;
    write_pair(out, "type", "BlockStored")?;
    encode::write_str(out, "block_hashes")?;
    encode::write_array_len(out, count(stored.hashes.len()))?;
    for hash in &stored.hashes {
        write_hash(out, hash, form)?;
    }
    encode::write_str(out, "parent_block_hash")?;
    match &stored.parent {
        Some(parent) => write_hash(out, parent, form)?,
        None => write_nil(out)?,
    }
    encode::write_str(out, "token_ids")?;
    encode::write_array_len(out, count(stored.tokens.len()))?;
    for token in &stored.tokens {
        encode::write_uint(out, u64::from(*token))?;
    }
    encode::write_str(out, "block_size")?;
    encode::write_uint(out, stored.block_size as u64)?;
    encode::write_str(out, "lora_id")?;
    match &stored.lora {
        Some((id, _)) => drop(encode::write_uint(out, u64::from(*id))?),
        None => write_nil(out)?,
    }
    write_pair(out, "medium", "GPU")?;
    encode::write_str(out, "lora_name")?;
    match &stored.lora {
        Some((_, name)) => encode::write_str(out, name)?,
        None => write_nil(out)?,
    }
    encode::write_str(out, "extra_keys")?;
    encode::write_array_len(out, count(stored.extra_keys.len()))?;
    for keys in &stored.extra_keys {
        write_keys(out, keys)?;
    }
    encode::write_str(out, "group_idx")?;
    encode::write_uint(out, 0)?;
    write_pair(out, "kv_cache_spec_kind", "full_attention")?;
    if let Some(session) = &stored.session_id {
        write_pair(out, "session_id", session)?;
    }
    Ok(())
}

/// Published keys are untagged: LoRA name, `[id, offset]`, salt, digest.
fn write_keys(out: &mut Vec<u8>, keys: &[ExtraKey]) -> Written {
    if keys.is_empty() {
        return write_nil(out);
    }
    encode::write_array_len(out, count(keys.len()))?;
    for key in keys {
        match key {
            ExtraKey::Lora { name: text, .. } | ExtraKey::Salt(text) => encode::write_str(out, text)?,
            ExtraKey::Media { id, offset } => {
                encode::write_array_len(out, 2)?;
                encode::write_str(out, id)?;
                encode::write_sint(out, *offset)?;
            }
            ExtraKey::Embeds(bytes) => encode::write_bin(out, bytes)?,
        }
    }
    Ok(())
}

fn write_hash(out: &mut Vec<u8>, hash: &Digest, form: HashForm) -> Written {
    match form {
        HashForm::Int => encode::write_uint(out, hash.low64()).map(drop),
        HashForm::Bytes => encode::write_bin(out, &hash.0),
    }
}

fn write_pair(out: &mut Vec<u8>, key: &str, value: &str) -> Written {
    encode::write_str(out, key)?;
    encode::write_str(out, value)
}

fn write_nil(out: &mut Vec<u8>) -> Written {
    encode::write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)
}
