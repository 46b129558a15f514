//! SGLang's events: how they are grouped, and their msgpack form.

use super::rules::{Removal, Rules};
use rmp::encode::{self, ValueWriteError};

/// What happened in the page tree.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Consecutive pages became cached.
    Stored(Stored),
    /// Pages left the cache.
    Removed(Vec<i64>),
    /// The whole cache was dropped.
    Cleared,
}

/// `BlockStored`.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// In order of position.
    pub hashes: Vec<i64>,
    /// `None` = the first of `hashes` is a first page.
    pub parent: Option<i64>,
    /// All tokens of all pages, pads included.
    pub tokens: Vec<u64>,
    /// Tokens per page.
    pub page_size: usize,
    /// `cache_salt`, where the release shows it.
    pub salt: Option<String>,
    /// `session_id`, likewise.
    pub session: Option<String>,
}

/// Adds an event to those of a step, grouped as the release does.
pub fn record(events: &mut Vec<Event>, event: Event, rules: &Rules) {
    match event {
        Event::Stored(stored) if rules.coalesced => match events.last_mut() {
            Some(Event::Stored(last)) if continues(last, &stored) => {
                last.hashes.extend(stored.hashes);
                last.tokens.extend(stored.tokens);
            }
            _ => events.push(Event::Stored(stored)),
        },
        Event::Stored(stored) => {
            let mut parent = stored.parent;
            for (hash, tokens) in stored.hashes.iter().zip(stored.tokens.chunks(stored.page_size)) {
                let (hashes, tokens) = (vec![*hash], tokens.to_vec());
                events.push(Event::Stored(Stored { hashes, parent, tokens, ..stored.clone() }));
                parent = Some(*hash);
            }
        }
        Event::Removed(hashes) => match (rules.removal, events.last_mut()) {
            (Removal::PerPage, _) => events.extend(hashes.iter().map(|hash| Event::Removed(vec![*hash]))),
            (Removal::Merged, Some(Event::Removed(last))) => last.extend(hashes),
            _ => events.push(Event::Removed(hashes)),
        },
        Event::Cleared => events.push(Event::Cleared),
    }
}

fn continues(last: &Stored, next: &Stored) -> bool {
    next.parent.is_some()
        && next.parent == last.hashes.last().copied()
        && (&last.salt, &last.session) == (&next.salt, &next.session)
}

/// Encodes one batch `[ts, [event…], rank]`. `ts` is Unix time in seconds.
pub fn encode_batch(ts: f64, events: &[Event], rules: &Rules, rank: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    write_batch(&mut out, ts, events, rules, rank).expect("writing to a Vec cannot fail");
    out
}

type Written = Result<(), ValueWriteError<std::io::Error>>;

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("bounded by the page pool, far below 2^32")
}

fn write_batch(out: &mut Vec<u8>, ts: f64, events: &[Event], rules: &Rules, rank: u32) -> Written {
    encode::write_array_len(out, 3)?;
    encode::write_f64(out, ts)?;
    encode::write_array_len(out, count(events.len()))?;
    for event in events {
        if rules.maps { write_map(out, event)? } else { write_array(out, event)? }
    }
    encode::write_uint(out, u64::from(rank))?;
    Ok(())
}

fn write_array(out: &mut Vec<u8>, event: &Event) -> Written {
    match event {
        Event::Cleared => {
            encode::write_array_len(out, 1)?;
            encode::write_str(out, "AllBlocksCleared")
        }
        Event::Removed(hashes) => {
            encode::write_array_len(out, 3)?;
            encode::write_str(out, "BlockRemoved")?;
            write_hashes(out, hashes)?;
            encode::write_str(out, "GPU")
        }
        Event::Stored(stored) => {
            encode::write_array_len(out, 7 + u32::from(stored.salt.is_some()))?;
            encode::write_str(out, "BlockStored")?;
            write_hashes(out, &stored.hashes)?;
            write_parent(out, stored.parent)?;
            write_tokens(out, &stored.tokens)?;
            encode::write_uint(out, stored.page_size as u64)?;
            write_nil(out)?;
            encode::write_str(out, "GPU")?;
            if let Some(salt) = &stored.salt {
                encode::write_map_len(out, 1)?;
                write_pair(out, "cache_salt", salt)?;
            }
            Ok(())
        }
    }
}

fn write_map(out: &mut Vec<u8>, event: &Event) -> Written {
    match event {
        Event::Cleared => {
            encode::write_map_len(out, 1)?;
            write_pair(out, "type", "AllBlocksCleared")
        }
        Event::Removed(hashes) => {
            encode::write_map_len(out, 3)?;
            write_pair(out, "type", "BlockRemoved")?;
            encode::write_str(out, "block_hashes")?;
            write_hashes(out, hashes)?;
            write_pair(out, "medium", "GPU")
        }
        Event::Stored(stored) => {
            let more = [("cache_salt", &stored.salt), ("session_id", &stored.session)];
            encode::write_map_len(out, 7 + count(more.iter().filter(|(_, text)| text.is_some()).count()))?;
            write_pair(out, "type", "BlockStored")?;
            encode::write_str(out, "block_hashes")?;
            write_hashes(out, &stored.hashes)?;
            encode::write_str(out, "parent_block_hash")?;
            write_parent(out, stored.parent)?;
            encode::write_str(out, "token_ids")?;
            write_tokens(out, &stored.tokens)?;
            encode::write_str(out, "block_size")?;
            encode::write_uint(out, stored.page_size as u64)?;
            encode::write_str(out, "lora_id")?;
            write_nil(out)?;
            write_pair(out, "medium", "GPU")?;
            for (key, text) in more {
                if let Some(text) = text {
                    write_pair(out, key, text)?;
                }
            }
            Ok(())
        }
    }
}

fn write_hashes(out: &mut Vec<u8>, hashes: &[i64]) -> Written {
    encode::write_array_len(out, count(hashes.len()))?;
    for hash in hashes {
        encode::write_sint(out, *hash)?;
    }
    Ok(())
}

fn write_parent(out: &mut Vec<u8>, parent: Option<i64>) -> Written {
    match parent {
        Some(parent) => encode::write_sint(out, parent).map(drop),
        None => write_nil(out),
    }
}

fn write_tokens(out: &mut Vec<u8>, tokens: &[u64]) -> Written {
    encode::write_array_len(out, count(tokens.len()))?;
    for token in tokens {
        encode::write_uint(out, *token)?;
    }
    Ok(())
}

fn write_pair(out: &mut Vec<u8>, key: &str, value: &str) -> Written {
    encode::write_str(out, key)?;
    encode::write_str(out, value)
}

fn write_nil(out: &mut Vec<u8>) -> Written {
    encode::write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)
}
