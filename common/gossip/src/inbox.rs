//! Balancer side of the block stream: checks what one sidecar says and turns it into changes of the index.
//!
//! **Invariant:** between a worker's `Live` and its next `Begin` or `Resync`, the changes given make exactly the set that the sidecar
//! published at the watermark; whatever does not fit asks for a snapshot instead.

use fovea_kv::{SequenceHash, Tier};

use fovea_kv::sums::Sums;

use crate::message::{
    BucketMask, Buckets, Delta, Digest, Embeddings, EngineFacts, FromSidecar, Hello, Learnt, Load, Repair, Snapshot,
};

/// Most workers behind one sidecar.
pub const WORKERS_MAX: usize = 1024;
/// Most hashes in one snapshot, all levels together: 256 MiB on the wire.
pub const SNAPSHOT_HASHES_MAX: u64 = 32 << 20;

/// What the balancer has to do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Facts of the sidecar, its engine and its workers; replaces those before.
    Hello(Hello),
    /// A new set begins for this worker, empty and not live; what was held before is void once it is live.
    Begin {
        worker: u16,
    },
    /// The same, but the new set begins with all that is held outside these buckets (by level).
    Mend {
        worker: u16,
        buckets: [BucketMask; 3],
    },
    /// To be taken out one by one, in order: children before parents.
    Removed {
        worker: u16,
        level: Tier,
        hashes: Vec<SequenceHash>,
    },
    /// To be put in one by one, in order: parents before children, except before `Live`, when any order may come.
    Stored {
        worker: u16,
        level: Tier,
        hashes: Vec<SequenceHash>,
    },
    /// The set begun is complete and counts from this moment; deltas go on behind `seq`.
    Live {
        worker: u16,
        epoch: u64,
        seq: u64,
    },
    /// The set that is live by now was a repair, of which so many hashes were sent.
    Repaired {
        worker: u16,
        hashes: u64,
    },
    /// What the set held must sum up to, at this watermark. Where it does not: [`FromBalancer::AskBuckets`](crate::message::FromBalancer).
    Digest {
        worker: u16,
        levels: [Sums; 3],
    },
    /// The same by bucket; [`crate::audit::remedy`] says what to do.
    Buckets(Buckets),
    /// What the sidecar's encoder holds, for all its workers.
    Embeddings(Embeddings),
    Load(Load),
    /// What the engine was seen to use; true for the whole pool, whichever worker it comes from.
    Learnt(Vec<Learnt>),
    /// Ask the sidecar for a snapshot. What is held for this worker must not count until the next `Live`.
    Resync {
        worker: u16,
    },
}

/// The sidecar broke the protocol: end the stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error("a message came before the hello; the peer is not a sidecar of this version")]
    NoHello,
    #[error("hello names {workers} workers, at most {WORKERS_MAX} are taken; run more sidecars")]
    TooManyWorkers { workers: usize },
    #[error("message for worker {worker}, the hello names {workers}; the sidecar is broken")]
    UnknownWorker { worker: u16, workers: usize },
    #[error(
        "snapshot of worker {worker} is longer than {SNAPSHOT_HASHES_MAX} hashes; limit what the sidecar publishes"
    )]
    SnapshotTooLong { worker: u16 },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Held {
    /// Nothing yet; a snapshot comes unasked.
    #[default]
    Nothing,
    /// A snapshot is under way.
    Filling {
        epoch: u64,
        seq: u64,
        hashes: u64,
        repair: bool,
    },
    Live {
        epoch: u64,
        seq: u64,
    },
    /// A snapshot was asked for; deltas and rests of snapshots are left out until it begins.
    Asked,
}

/// State of one stream. A new connection is a new inbox.
#[derive(Debug, Default)]
pub struct Inbox {
    hello: Option<Hello>,
    workers: Vec<Held>,
}

impl Inbox {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn hello(&self) -> Option<&Hello> {
        self.hello.as_ref()
    }

    /// Epoch and seq that are applied, for acknowledging; `None` while the worker is not live.
    pub fn watermark(&self, worker: u16) -> Option<(u64, u64)> {
        match self.workers.get(usize::from(worker)) {
            Some(&Held::Live { epoch, seq }) => Some((epoch, seq)),
            _ => None,
        }
    }

    /// The balancer found too much wrong with what it holds: everything of this worker is left out until a snapshot begins. The caller
    /// sends the resync.
    pub fn resync(&mut self, worker: u16) {
        if let Some(held) = self.workers.get_mut(usize::from(worker)) {
            *held = Held::Asked;
        }
    }

    /// # Errors
    /// When the sidecar broke the protocol; the inbox must not be used after that.
    pub fn apply(&mut self, message: FromSidecar) -> Result<Vec<Change>, ProtocolError> {
        match message {
            FromSidecar::Hello(hello) => self.greet(hello),
            _ if self.hello.is_none() => Err(ProtocolError::NoHello),
            FromSidecar::Snapshot(snapshot) => self.snapshot(snapshot),
            FromSidecar::Delta(delta) => self.delta(delta),
            FromSidecar::Load(load) => {
                self.held(load.worker)?;
                Ok(vec![Change::Load(load)])
            }
            FromSidecar::Learnt(facts) => Ok(vec![Change::Learnt(facts)]),
            FromSidecar::Digest(digest) => self.digest(digest),
            FromSidecar::Buckets(buckets) => self.buckets(buckets),
            FromSidecar::Repair(repair) => self.repair(repair),
            FromSidecar::Embeddings(embeddings) => Ok(vec![Change::Embeddings(embeddings)]),
            FromSidecar::Heartbeat => Ok(Vec::new()),
        }
    }

    fn held(&mut self, worker: u16) -> Result<&mut Held, ProtocolError> {
        let workers = self.workers.len();
        self.workers.get_mut(usize::from(worker)).ok_or(ProtocolError::UnknownWorker { worker, workers })
    }

    fn greet(&mut self, hello: Hello) -> Result<Vec<Change>, ProtocolError> {
        if hello.workers.len() > WORKERS_MAX {
            return Err(ProtocolError::TooManyWorkers { workers: hello.workers.len() });
        }
        self.workers.resize(hello.workers.len(), Held::Nothing);
        let mut changes = vec![Change::Hello(hello.clone())];
        if let Some(before) = self.hello.replace(hello.clone()) {
            let other_engine = prediction_facts(&before.engine) != prediction_facts(&hello.engine);
            for ((worker, held), (old, new)) in
                (0..).zip(&mut self.workers).zip(before.workers.iter().zip(&hello.workers))
            {
                let other_pool = other_engine || old.block_size != new.block_size;
                if other_pool && !matches!(held, Held::Nothing | Held::Asked) {
                    changes.push(ask(worker, held));
                }
            }
        }
        Ok(changes)
    }

    fn snapshot(&mut self, snapshot: Snapshot) -> Result<Vec<Change>, ProtocolError> {
        let Snapshot { worker, epoch, seq, level, first, last, hashes } = snapshot;
        let held = self.held(worker)?;
        let mut changes = Vec::with_capacity(3);
        let (before, repair) = match *held {
            _ if first => {
                changes.push(Change::Begin { worker });
                (0, false)
            }
            Held::Filling { epoch: e, seq: s, hashes, repair } if (e, s) == (epoch, seq) => (hashes, repair),
            Held::Asked => return Ok(Vec::new()),
            _ => return Ok(vec![ask(worker, held)]),
        };
        let total = before + hashes.len() as u64;
        if total > SNAPSHOT_HASHES_MAX {
            return Err(ProtocolError::SnapshotTooLong { worker });
        }
        if !hashes.is_empty() {
            changes.push(Change::Stored { worker, level, hashes });
        }
        *held = Held::Filling { epoch, seq, hashes: total, repair };
        if last {
            *held = Held::Live { epoch, seq };
            changes.push(Change::Live { worker, epoch, seq });
            changes.extend(repair.then_some(Change::Repaired { worker, hashes: total }));
        }
        Ok(changes)
    }

    /// Sums of another watermark tell that a delta was left out: the stream is in order, so they must be of ours.
    fn digest(&mut self, digest: Digest) -> Result<Vec<Change>, ProtocolError> {
        let Digest { worker, epoch, seq, levels } = digest;
        let held = self.held(worker)?;
        Ok(match at_watermark(worker, held, epoch, seq) {
            Place::Ours => vec![Change::Digest { worker, levels }],
            Place::NotLive => Vec::new(),
            Place::Other(ask) => vec![ask],
        })
    }

    fn buckets(&mut self, buckets: Buckets) -> Result<Vec<Change>, ProtocolError> {
        let held = self.held(buckets.worker)?;
        Ok(match at_watermark(buckets.worker, held, buckets.epoch, buckets.seq) {
            Place::Ours => vec![Change::Buckets(buckets)],
            Place::NotLive => Vec::new(),
            Place::Other(ask) => vec![ask],
        })
    }

    fn repair(&mut self, repair: Repair) -> Result<Vec<Change>, ProtocolError> {
        let Repair { worker, epoch, seq, buckets } = repair;
        let held = self.held(worker)?;
        Ok(match at_watermark(worker, held, epoch, seq) {
            Place::Ours => {
                *held = Held::Filling { epoch, seq, hashes: 0, repair: true };
                vec![Change::Mend { worker, buckets }]
            }
            // What follows would be taken for the rest of another snapshot.
            Place::NotLive if *held != Held::Asked => vec![ask(worker, held)],
            Place::NotLive => Vec::new(),
            Place::Other(ask) => vec![ask],
        })
    }

    fn delta(&mut self, delta: Delta) -> Result<Vec<Change>, ProtocolError> {
        let Delta { worker, epoch, seq, levels } = delta;
        let held = self.held(worker)?;
        match held {
            Held::Live { epoch: e, seq: s } if *e == epoch && s.checked_add(1) == Some(seq) => *s = seq,
            Held::Asked => return Ok(Vec::new()),
            _ => return Ok(vec![ask(worker, held)]),
        }
        let mut changes = Vec::new();
        for (level, lists) in Tier::ALL.into_iter().zip(levels) {
            if !lists.removed.is_empty() {
                changes.push(Change::Removed { worker, level, hashes: lists.removed });
            }
            if !lists.stored.is_empty() {
                changes.push(Change::Stored { worker, level, hashes: lists.stored });
            }
        }
        Ok(changes)
    }
}

enum Place {
    Ours,
    NotLive,
    Other(Change),
}

fn at_watermark(worker: u16, held: &mut Held, epoch: u64, seq: u64) -> Place {
    match *held {
        Held::Live { epoch: e, seq: s } if (e, s) == (epoch, seq) => Place::Ours,
        Held::Live { .. } => Place::Other(ask(worker, held)),
        _ => Place::NotLive,
    }
}

fn ask(worker: u16, held: &mut Held) -> Change {
    *held = Held::Asked;
    Change::Resync { worker }
}

/// The facts on which a worker's pool depends: all but the names it is served under.
fn prediction_facts(engine: &EngineFacts) -> EngineFacts {
    EngineFacts { served_names: Vec::new(), lora_names: Vec::new(), ..engine.clone() }
}

#[cfg(test)]
mod tests;
