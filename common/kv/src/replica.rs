//! Sequence state machine of one engine's event stream: makes a gapless order of batches out of a lossy one, or says that it cannot.
//!
//! ```text
//!            Connected                      replay done, nothing missing
//!   Down ───────────────▶ Replaying ─────────────────────────────────────▶ Live
//!    ▲  ▲                  │  ▲   ▲                                          │
//!    │  └──────────────────┘  │   └── gap, or a batch that does not fit ─────┘
//!    │      Disconnected      └── ask again while a replay brings something new, at most `MAX_TRIES` times without
//!    └────────────────────────────────── Disconnected ─────────────────────── (from Live)
//! ```
//!
//! * **Which life is it?** An engine numbers its batches from 0 in each life, so a restarted engine may look like a gap. Every replay
//!   therefore begins with the last batch applied, the *witness*: the same bytes at the same number prove the same life (a payload
//!   carries the engine's clock). Other bytes, or an engine that has not come so far, are a new life: everything is void, replay from 0.
//! * **Lost history.** When an engine no longer has the batch that is needed, or has no replay, what it holds cannot be known:
//!   everything is void and [`Replica::is_complete`] is false until the engine clears its cache or begins a new life.
//!   What is held meanwhile is a subset of the truth, as far as the engine announces its removals.
//! * **Silence.** A lost last batch leaves no gap. An audit asks for a replay while the stream stays live; its failure changes nothing.
//! * Live batches that arrive while a replay runs wait, bounded in number and bytes; one that finds no room is a gap later on.
//!
//! **Invariant:** batches of one life are applied in order, each once, without a hole that is not announced by [`Action::Reset`].
//! The caller reports every disconnect, and cancels a replay when it is asked for the next one.

mod waiting;

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;

use waiting::Waiting;
use xxhash_rust::xxh3::xxh3_64;

use crate::event::{Batch, DecodeError, KvEvent, Skipped};

/// Replays in a row that bring nothing new before what is missing counts as lost.
const MAX_TRIES: u8 = 2;
/// Applied batches whose digests are kept to know a repeated batch from one of another life: 8 KiB.
const DIGESTS: usize = 1024;

/// Turns a payload into events: the dialect of the engine.
struct Decode(Box<Read>);
type Read = dyn Fn(&[u8]) -> Result<Batch, DecodeError> + Send + Sync;

impl fmt::Debug for Decode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Decode")
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// The subscription stands; what was published before is unknown.
    Connected,
    Disconnected,
    /// The stream has been silent: was the last batch received the last one sent? An engine without replay leaves all as it is.
    Audit,
    /// A batch from the subscription.
    Live {
        seq: u64,
        payload: Vec<u8>,
    },
    /// A batch from the replay with this number.
    Replayed {
        ask: u64,
        seq: u64,
        payload: Vec<u8>,
    },
    /// The end marker of that replay came.
    ReplayEnd {
        ask: u64,
    },
    /// That replay gave no (further) answer in time, or the engine offers none.
    ReplayFailed {
        ask: u64,
    },
    /// The proxy saw a call that empties the engine's cache; the engine itself tells only with its next batch.
    CacheReset,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Ask the engine for its batches from `from` on, give them back with this `ask`, and drop any replay before it.
    AskReplay {
        ask: u64,
        from: u64,
    },
    /// The next batch in order.
    Apply(Batch),
    /// All that was applied is void: a new epoch begins.
    Reset,
    /// This payload cannot be read. A `Reset` follows: what it removed is unknown.
    Undecodable {
        seq: u64,
        error: DecodeError,
    },
    Count(Count),
}

/// What happened to the stream. A closed set: it is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Count {
    /// A live batch came with others missing before it.
    Gap,
    /// A batch that is applied already came again.
    Duplicate,
    /// A batch below the expected number that cannot be told from one of a new life.
    Suspect,
    /// The engine began a new life.
    Restart,
    /// The engine no longer has what is missing.
    HistoryLost,
    /// No room to keep a live batch while a replay runs.
    Overflow,
    /// An input that belongs to no present connection or replay.
    Stray,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Down,
    Live,
    Replaying(Replay),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Replay {
    ask: u64,
    /// Replays before this one that brought nothing.
    tries: u8,
    /// The witness was seen, or there is none.
    same_life: bool,
    /// A batch was applied from it.
    progress: bool,
    /// Nothing spoke against what is held: it only asks, and its failure proves nothing.
    audit: bool,
}

/// The state machine. Pure: every step takes one input and returns what is to be done.
#[derive(Debug)]
pub struct Replica {
    decode: Decode,
    link: Link,
    /// Number of the batch to apply next; `None` = whatever comes first.
    next: Option<u64>,
    /// Digests of the batches just before `next`, oldest first. The last is the witness.
    applied: VecDeque<u64>,
    waiting: Waiting,
    asks: u64,
    /// All batches of this life since 0, or since the engine was empty, are applied.
    whole: bool,
    /// The proxy's clear may be undone by batches from before it: repeat it when the replay is over.
    clear_again: bool,
    out: Vec<Action>,
}

impl Replica {
    pub fn new(decode: impl Fn(&[u8]) -> Result<Batch, DecodeError> + Send + Sync + 'static) -> Self {
        Self {
            decode: Decode(Box::new(decode)),
            link: Link::Down,
            next: Some(0),
            applied: VecDeque::new(),
            waiting: Waiting::default(),
            asks: 0,
            whole: false,
            clear_again: false,
            out: Vec::new(),
        }
    }

    /// Connected, and no batch known to be missing.
    pub fn is_live(&self) -> bool {
        matches!(self.link, Link::Live | Link::Replaying(Replay { audit: true, .. }))
    }

    /// Live, and nothing of what the engine holds is unknown.
    pub fn is_complete(&self) -> bool {
        self.is_live() && self.whole
    }

    /// Watermark: highest batch applied with nothing missing below it in this epoch.
    pub fn applied_seq(&self) -> Option<u64> {
        if self.applied.is_empty() { None } else { self.next.and_then(|next| next.checked_sub(1)) }
    }

    pub fn step(&mut self, input: Input) -> Vec<Action> {
        match input {
            Input::Connected => {
                self.waiting.clear();
                self.ask(0, false);
            }
            Input::Audit => match self.link {
                Link::Down => self.count(Count::Stray),
                Link::Replaying(_) => {}
                Link::Live => self.ask(0, true),
            },
            Input::Disconnected => {
                self.waiting.clear();
                self.link = Link::Down;
            }
            Input::Live { seq, payload } => match self.link {
                Link::Down => self.count(Count::Stray),
                Link::Replaying(_) => self.keep(seq, payload),
                Link::Live => self.live(seq, payload),
            },
            Input::Replayed { ask, seq, payload } => match self.link {
                Link::Replaying(replay) if replay.ask == ask => self.replayed(replay, seq, &payload),
                _ => self.count(Count::Stray),
            },
            Input::ReplayEnd { ask } => match self.link {
                Link::Replaying(replay) if replay.ask == ask => self.replay_end(replay),
                _ => self.count(Count::Stray),
            },
            Input::ReplayFailed { ask } => match self.link {
                Link::Replaying(replay) if replay.ask == ask => self.replay_failed(replay),
                _ => self.count(Count::Stray),
            },
            Input::CacheReset => {
                self.clear_again = true;
                self.out.push(Action::Apply(Batch { events: vec![KvEvent::Cleared], ..Batch::default() }));
                if self.link == Link::Live {
                    // Batches from before the call may still be on their way.
                    self.ask(0, true);
                }
            }
        }
        self.check_invariants();
        std::mem::take(&mut self.out)
    }

    fn count(&mut self, what: Count) {
        self.out.push(Action::Count(what));
    }

    fn keep(&mut self, seq: u64, payload: Vec<u8>) {
        if !self.waiting.insert(seq, payload) {
            self.count(Count::Overflow);
        }
    }

    fn ask(&mut self, tries: u8, audit: bool) {
        self.asks += 1;
        let from = self.applied_seq().or(self.next).unwrap_or(0);
        let same_life = self.applied.is_empty();
        self.link = Link::Replaying(Replay { ask: self.asks, tries, same_life, progress: false, audit });
        self.out.push(Action::AskReplay { ask: self.asks, from });
    }

    fn live(&mut self, seq: u64, payload: Vec<u8>) {
        let expected = *self.next.get_or_insert(seq);
        if seq == expected {
            self.apply(seq, &payload);
        } else if seq > expected {
            self.count(Count::Gap);
            self.keep(seq, payload);
            self.ask(0, false);
        } else if self.digest(seq) == Some(xxh3_64(&payload)) {
            self.count(Count::Duplicate);
        } else {
            self.count(Count::Suspect);
            self.keep(seq, payload);
            self.ask(0, false);
        }
    }

    fn replayed(&mut self, replay: Replay, seq: u64, payload: &[u8]) {
        let Replay { mut same_life, mut progress, .. } = replay;
        if let (false, Some(witness)) = (same_life, self.applied_seq()) {
            if seq < witness {
                return;
            }
            if seq == witness && self.digest(seq) != Some(xxh3_64(payload)) {
                return self.restart();
            }
            if seq > witness {
                self.lose(Some(seq));
            }
            same_life = true;
        }
        let expected = *self.next.get_or_insert(seq);
        if seq > expected {
            self.lose(Some(seq));
        }
        if seq >= expected {
            self.apply(seq, payload);
            progress = true;
        }
        self.link = Link::Replaying(Replay { same_life, progress, ..replay });
    }

    fn replay_end(&mut self, replay: Replay) {
        if !replay.same_life {
            // The engine has no batch as high as the last one applied.
            return self.restart();
        }
        if self.applied.is_empty() && self.next == Some(0) {
            self.whole = true;
        }
        self.resume(replay, false);
    }

    fn replay_failed(&mut self, replay: Replay) {
        if replay.progress {
            // A long replay to a slow reader is cut short by the engine without an end marker.
            self.ask(0, false);
        } else if replay.tries + 1 < MAX_TRIES {
            self.ask(replay.tries + 1, replay.audit);
        } else {
            if !replay.audit && (!replay.same_life || self.applied.is_empty()) {
                self.lose(self.waiting.first());
            }
            self.resume(replay, true);
        }
    }

    /// Applies what waited. A hole that is left asks for one more replay, unless that has been tried enough.
    fn resume(&mut self, replay: Replay, failed: bool) {
        self.link = Link::Live;
        let mut lost = failed || !replay.progress && replay.tries + 1 >= MAX_TRIES;
        while self.link == Link::Live {
            let Some((seq, payload)) = self.waiting.pop() else { break };
            match self.next {
                Some(next) if seq > next && lost => {
                    self.lose(Some(seq));
                    self.apply(seq, &payload);
                    lost = false;
                }
                Some(next) if seq > next => {
                    self.keep(seq, payload);
                    let tries = if replay.progress { 0 } else { replay.tries + 1 };
                    self.ask(tries, false);
                }
                Some(next) if seq < next => match self.digest(seq) {
                    Some(digest) if digest != xxh3_64(&payload) => self.restart(),
                    None if !replay.same_life => self.restart(),
                    // Older than the digests go, but the witness has just shown that the life is the same.
                    _ => self.count(Count::Duplicate),
                },
                _ => self.live(seq, payload),
            }
        }
        if self.link == Link::Live && std::mem::take(&mut self.clear_again) {
            // It may take away what a new life stored since the call: whole again with the engine's own clear.
            self.whole = false;
            self.out.push(Action::Apply(Batch { events: vec![KvEvent::Cleared], ..Batch::default() }));
        }
    }

    fn apply(&mut self, seq: u64, payload: &[u8]) {
        // The end marker of a replay carries the highest number: no batch has it.
        let Some(next) = seq.checked_add(1) else { return self.count(Count::Stray) };
        if self.applied.len() == DIGESTS {
            self.applied.pop_front();
        }
        if self.applied.is_empty() && seq == 0 {
            self.whole = true;
        }
        self.applied.push_back(xxh3_64(payload));
        self.next = Some(next);
        match (self.decode.0)(payload) {
            Ok(batch) => {
                if batch.events.contains(&KvEvent::Cleared) {
                    self.whole = true;
                    self.clear_again = false;
                }
                let unknown = batch.skipped.contains(&Skipped::Removal);
                self.out.push(Action::Apply(batch));
                if unknown {
                    self.whole = false;
                    self.out.push(Action::Reset);
                }
            }
            Err(error) => {
                self.whole = false;
                self.out.push(Action::Undecodable { seq, error });
                self.out.push(Action::Reset);
            }
        }
    }

    /// A new life: all of it is still to be had.
    fn restart(&mut self) {
        self.count(Count::Restart);
        self.out.push(Action::Reset);
        self.applied.clear();
        self.next = Some(0);
        self.whole = false;
        self.clear_again = false;
        // Whatever waited is in the replay too, and may be of the old life.
        self.waiting.clear();
        self.ask(0, false);
    }

    /// What lies before `next` cannot be had any more.
    fn lose(&mut self, next: Option<u64>) {
        self.count(Count::HistoryLost);
        self.out.push(Action::Reset);
        self.applied.clear();
        self.next = next;
        self.whole = false;
    }

    /// Digest of an applied batch, as far back as they are kept.
    fn digest(&self, seq: u64) -> Option<u64> {
        let back = usize::try_from(self.next?.checked_sub(seq)?).ok()?;
        self.applied.len().checked_sub(back).and_then(|index| self.applied.get(index)).copied()
    }

    fn check_invariants(&self) {
        debug_assert!(self.applied.len() <= DIGESTS);
        debug_assert!(self.applied.is_empty() || self.next.is_some_and(|next| next >= self.applied.len() as u64));
        debug_assert!(self.link != Link::Live || self.waiting.first().is_none(), "nothing waits without a replay");
    }
}
