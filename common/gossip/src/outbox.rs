//! Sidecar side of the block stream: one ring of encoded deltas per worker, shared by all balancers, each with a cursor.
//!
//! A balancer that falls behind the ring gets a snapshot; nothing is kept for it meanwhile.
//!
//! **Invariant:** memory is bounded by `workers × RingLimits` whatever balancers do; a delta is encoded once for all of them.

use std::collections::VecDeque;

use bytes::Bytes;
use fovea_kv::{SequenceHash, Tier};

use crate::audit::is_in;
use crate::codec::{MAX_HASHES_PER_FRAME, encode_sidecar};
use crate::message::{BucketMask, Delta, FromSidecar, LevelDelta, Repair, Snapshot};

/// Hashes in one frame of a snapshot: small enough that other workers' frames are not held up.
pub const SNAPSHOT_CHUNK_HASHES: usize = 4096;

/// Bounds of one worker's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLimits {
    pub bytes: usize,
    pub frames: usize,
}

impl Default for RingLimits {
    /// About a minute of a busy worker (5 k events/s × 8 B) in 2 MiB, 64 k frames.
    fn default() -> Self {
        Self { bytes: 2 << 20, frames: 64 << 10 }
    }
}

/// What to send next to one balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send these bytes; the cursor has moved past them.
    Frame(Bytes),
    /// Send [`snapshot_frames`] of this worker, then call [`Cursor::snapshot_taken`]. `epoch` and `seq` are the outbox's at this moment:
    /// the set to send is the one after everything pushed.
    NeedSnapshot { worker: u16, epoch: u64, seq: u64 },
    /// Nothing until the next push or reset.
    Idle,
}

/// Where one balancer is, worker by worker. Starts with nothing; lives as long as the connection.
#[derive(Clone, Debug, Default)]
pub struct Cursor {
    places: Vec<Option<Place>>,
    /// Worker to look at first: each gets its turn.
    turn: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    epoch: u64,
    /// Highest seq sent.
    seq: u64,
}

impl Cursor {
    /// A snapshot of `worker` at this epoch and seq was put on the stream; deltas go on behind it.
    pub fn snapshot_taken(&mut self, worker: u16, epoch: u64, seq: u64) {
        let worker = usize::from(worker);
        if self.places.len() <= worker {
            self.places.resize(worker + 1, None);
        }
        self.places[worker] = Some(Place { epoch, seq });
    }

    /// Is everything up to this epoch and seq of `worker` on the stream, and nothing after it? Digests, buckets and repairs of that
    /// moment may be sent then.
    pub fn is_at(&self, worker: u16, epoch: u64, seq: u64) -> bool {
        self.places.get(usize::from(worker)).copied().flatten() == Some(Place { epoch, seq })
    }

    /// The balancer asked for a snapshot of `worker`.
    pub fn resync(&mut self, worker: u16) {
        if let Some(place) = self.places.get_mut(usize::from(worker)) {
            *place = None;
        }
    }
}

#[derive(Debug, Default)]
struct Ring {
    epoch: u64,
    /// Of the last frame; 0 = none in this epoch.
    seq: u64,
    frames: VecDeque<Bytes>,
    bytes: usize,
}

#[derive(Debug)]
pub struct Outbox {
    rings: Vec<Ring>,
    limits: RingLimits,
}

impl Outbox {
    /// One worker per element of `epochs`, each at seq 0. An epoch is new for every life of an engine and of the sidecar.
    pub fn new(epochs: &[u64], limits: RingLimits) -> Self {
        let ring = |&epoch| Ring { epoch, ..Ring::default() };
        Self { rings: epochs.iter().map(ring).collect(), limits }
    }

    /// Epoch and last seq of a worker.
    pub fn watermark(&self, worker: u16) -> Option<(u64, u64)> {
        self.rings.get(usize::from(worker)).map(|ring| (ring.epoch, ring.seq))
    }

    /// Bytes and frames kept for balancers that lag behind in this worker.
    pub fn held(&self, worker: u16) -> (usize, usize) {
        self.rings.get(usize::from(worker)).map_or((0, 0), |ring| (ring.bytes, ring.frames.len()))
    }

    /// Appends a difference, in as many frames as it needs; gives the seq of the last. Nothing to say = no frame.
    /// An unknown worker is ignored (0).
    ///
    /// Per level: removed, children before parents; stored, parents before children.
    pub fn push(&mut self, worker: u16, levels: [LevelDelta; 3]) -> u64 {
        let Some(ring) = self.rings.get_mut(usize::from(worker)) else { return 0 };
        for levels in split(levels) {
            ring.seq += 1;
            let delta = Delta { worker, epoch: ring.epoch, seq: ring.seq, levels };
            let frame = encode_sidecar(&FromSidecar::Delta(delta)).expect("a split delta is shorter than a frame");
            ring.bytes += frame.len();
            ring.frames.push_back(frame);
            while ring.bytes > self.limits.bytes || ring.frames.len() > self.limits.frames {
                let Some(oldest) = ring.frames.pop_front() else { break };
                ring.bytes -= oldest.len();
            }
        }
        ring.seq
    }

    /// Everything said about a worker is void (engine restart, lost history): its seq starts anew and every balancer needs a snapshot.
    /// `epoch` must differ from every one before.
    pub fn reset(&mut self, worker: u16, epoch: u64) {
        if let Some(ring) = self.rings.get_mut(usize::from(worker)) {
            debug_assert_ne!(ring.epoch, epoch, "an epoch is used once");
            *ring = Ring { epoch, ..Ring::default() };
        }
    }

    /// What the balancer of `cursor` gets next. Workers take turns. O(workers) when there is nothing.
    pub fn poll(&self, cursor: &mut Cursor) -> Next {
        let workers = self.rings.len();
        for turn in (0..workers).map(|step| (cursor.turn + step) % workers) {
            let ring = &self.rings[turn];
            let Ok(worker) = u16::try_from(turn) else { break };
            let place = cursor.places.get_mut(turn).and_then(Option::as_mut).filter(|place| place.epoch == ring.epoch);
            let behind = place.as_ref().and_then(|place| ring.seq.checked_sub(place.seq));
            let (Some(place), Some(behind)) = (place, behind.and_then(|n| usize::try_from(n).ok())) else {
                return Next::NeedSnapshot { worker, epoch: ring.epoch, seq: ring.seq };
            };
            if behind == 0 {
                continue;
            }
            let Some(frame) = ring.frames.len().checked_sub(behind).and_then(|at| ring.frames.get(at)) else {
                return Next::NeedSnapshot { worker, epoch: ring.epoch, seq: ring.seq };
            };
            place.seq += 1;
            cursor.turn = (turn + 1) % workers;
            return Next::Frame(frame.clone());
        }
        Next::Idle
    }
}

/// Cuts a delta into parts that fit a frame each. Every part, applied level by level, keeps the order of the whole.
fn split(mut levels: [LevelDelta; 3]) -> Vec<[LevelDelta; 3]> {
    let total: usize = levels.iter().map(|level| level.removed.len() + level.stored.len()).sum();
    if total == 0 {
        return Vec::new();
    }
    if total <= MAX_HASHES_PER_FRAME {
        return vec![levels];
    }
    let mut parts = vec![<[LevelDelta; 3]>::default()];
    let mut room = MAX_HASHES_PER_FRAME;
    for (index, level) in levels.iter_mut().enumerate() {
        for (stores, mut list) in
            [(false, std::mem::take(&mut level.removed)), (true, std::mem::take(&mut level.stored))]
        {
            while !list.is_empty() {
                if room == 0 {
                    parts.push(Default::default());
                    room = MAX_HASHES_PER_FRAME;
                }
                let rest = list.split_off(room.min(list.len()));
                room -= list.len();
                let part = &mut parts.last_mut().expect("never empty")[index];
                *(if stores { &mut part.stored } else { &mut part.removed }) = list;
                list = rest;
            }
        }
    }
    parts
}

/// Frames of one worker's snapshot, encoded one by one as they are taken: `first` is set on the first, `last` on the last, and an
/// empty set is one empty frame. `levels[i]` is the whole published set of level i.
pub fn snapshot_frames(
    worker: u16,
    epoch: u64,
    seq: u64,
    levels: [Vec<SequenceHash>; 3],
) -> impl Iterator<Item = Bytes> + Send {
    chunks(worker, epoch, seq, levels, true)
}

/// `begins`: the first one begins a set.
fn chunks(
    worker: u16,
    epoch: u64,
    seq: u64,
    levels: [Vec<SequenceHash>; 3],
    begins: bool,
) -> impl Iterator<Item = Bytes> + Send {
    let chunks = |level: &Vec<SequenceHash>| level.len().div_ceil(SNAPSHOT_CHUNK_HASHES);
    let total = levels.iter().map(chunks).sum::<usize>().max(1);
    let (mut level, mut start) = (0, 0);
    (0..total).map(move |index| {
        while level < 2 && start >= levels[level].len() {
            (level, start) = (level + 1, 0);
        }
        let end = levels[level].len().min(start + SNAPSHOT_CHUNK_HASHES);
        let hashes = levels[level][start..end].to_vec();
        start = end;
        let (first, last) = (begins && index == 0, index + 1 == total);
        let snapshot = Snapshot { worker, epoch, seq, level: Tier::ALL[level], first, last, hashes };
        encode_sidecar(&FromSidecar::Snapshot(snapshot)).expect("a chunk is shorter than a frame")
    })
}

/// Frames of a repair: its head, then what `levels` (the whole published sets) have in these buckets.
pub fn repair_frames(
    worker: u16,
    epoch: u64,
    seq: u64,
    buckets: [BucketMask; 3],
    mut levels: [Vec<SequenceHash>; 3],
) -> impl Iterator<Item = Bytes> + Send {
    for (level, mask) in levels.iter_mut().zip(&buckets) {
        level.retain(|hash| is_in(mask, *hash));
    }
    let head = encode_sidecar(&FromSidecar::Repair(Repair { worker, epoch, seq, buckets }));
    let head = head.expect("a record of a hundred bytes is shorter than a frame");
    std::iter::once(head).chain(chunks(worker, epoch, seq, levels, false))
}

#[cfg(test)]
mod tests;
