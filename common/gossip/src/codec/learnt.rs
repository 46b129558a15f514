//! Body of a learnt message: a list of facts as postcard record. A later minor may add behind the list.

use bytes::Bytes;
use fovea_kv::{MediaId, MediaKey};
use serde::{Deserialize, Serialize};

use super::{CodecError, LEARNT, frame, malformed, record};
use crate::message::{Learnt, LearntValue};

/// Most facts in one frame; each is at most 71 bytes long, so that such a frame is always short enough.
pub const MAX_LEARNT_PER_FRAME: usize = 8 << 10;

/// How many tokens pads may have.
const PADS: [usize; 2] = [1, 4];

#[derive(Serialize, Deserialize)]
enum Value {
    Id([u8; 32]),
    Pads(Vec<u32>),
    Nothing,
}

type Fact = ([u8; 32], u32, Value);

/// Frames that say all of `facts`, in order.
///
/// # Errors
/// For a frame with pads of another number than 1 or 4: no engine has them.
pub fn learnt_frames(facts: &[Learnt]) -> impl Iterator<Item = Result<Bytes, CodecError>> {
    facts.chunks(MAX_LEARNT_PER_FRAME).map(encode)
}

pub(super) fn encode(facts: &[Learnt]) -> Result<Bytes, CodecError> {
    check_count(facts.len())?;
    let fact = |learnt: &Learnt| {
        let value = match &learnt.value {
            LearntValue::Id(id) => Value::Id(id.0),
            LearntValue::Pads(pads) if PADS.contains(&pads.len()) => Value::Pads(pads.clone()),
            LearntValue::Pads(_) => return Err(malformed("learnt")),
            LearntValue::Nothing => Value::Nothing,
        };
        Ok((learnt.key.0, learnt.tokens, value))
    };
    let facts = facts.iter().map(fact).collect::<Result<Vec<Fact>, _>>()?;
    frame(LEARNT, &(), &postcard::to_stdvec(&facts).map_err(|_| malformed("learnt"))?)
}

pub(super) fn decode(body: &[u8]) -> Result<Vec<Learnt>, CodecError> {
    let facts: Vec<Fact> = record(body, "learnt")?;
    check_count(facts.len())?;
    let learnt = |(key, tokens, value)| {
        let value = match value {
            Value::Id(id) => LearntValue::Id(MediaId(id)),
            Value::Pads(pads) if PADS.contains(&pads.len()) => LearntValue::Pads(pads),
            Value::Pads(_) => return Err(malformed("learnt")),
            Value::Nothing => LearntValue::Nothing,
        };
        Ok(Learnt { key: MediaKey(key), tokens, value })
    };
    facts.into_iter().map(learnt).collect()
}

fn check_count(facts: usize) -> Result<(), CodecError> {
    if facts > MAX_LEARNT_PER_FRAME { Err(CodecError::TooManyLearnt { facts }) } else { Ok(()) }
}
