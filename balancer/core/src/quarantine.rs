//! Requests that end engines: kept from walking through a pool.
//!
//! A request during which its engine died is *suspect*. When an engine dies under it again, it is *poison*, and refused for a while.
//! Others die beside it, so a suspect that is tried again gets a worker on which no other suspect is on trial: the second death then
//! names the right one. A suspect that is answered whole is cleared.
//! **Invariant:** a fingerprint is refused only after two deaths within the time to live, none answered in between.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// Names a request by what an engine would see of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Suspects and poison remembered; the one that is oldest goes first. 0 = nothing is remembered.
    pub entries_max: usize,
    /// Forgotten this long after the last death.
    pub ttl: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { entries_max: 4096, ttl: Duration::from_secs(600) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Clear,
    /// One engine died.
    Suspect,
    /// Two did; refused for so long yet.
    Poison {
        left: Duration,
    },
}

/// Deaths that make a suspect poison.
const DEATHS_MAX: u32 = 2;

#[derive(Clone, Copy, Debug)]
struct Entry {
    deaths: u32,
    until: Instant,
    /// Its place in the order of deaths.
    order: u64,
}

#[derive(Clone, Debug)]
pub struct Quarantine {
    settings: Settings,
    entries: HashMap<Fingerprint, Entry>,
    /// Oldest death first.
    order: BTreeMap<u64, Fingerprint>,
    next: u64,
}

impl Quarantine {
    pub fn new(settings: Settings) -> Self {
        Self { settings, entries: HashMap::new(), order: BTreeMap::new(), next: 0 }
    }

    /// Nothing is suspect: no fingerprint need be computed.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn standing(&self, of: Fingerprint, now: Instant) -> Standing {
        match self.entries.get(&of).filter(|entry| entry.until > now) {
            None => Standing::Clear,
            Some(entry) if entry.deaths < DEATHS_MAX => Standing::Suspect,
            Some(entry) => Standing::Poison { left: entry.until.saturating_duration_since(now) },
        }
    }

    /// An engine died under this request.
    pub fn died(&mut self, of: Fingerprint, now: Instant) -> Standing {
        self.forget_old(now);
        if self.settings.entries_max == 0 {
            return Standing::Clear;
        }
        let before = self.entries.get(&of).copied();
        if let Some(before) = before {
            self.order.remove(&before.order);
        } else if self.entries.len() >= self.settings.entries_max
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.entries.remove(&oldest);
        }
        let deaths = before.map_or(0, |entry| entry.deaths).saturating_add(1);
        self.entries.insert(of, Entry { deaths, until: now + self.settings.ttl, order: self.next });
        self.order.insert(self.next, of);
        self.next += 1;
        self.standing(of, now)
    }

    /// An engine answered this request to its end and lives.
    pub fn answered(&mut self, of: Fingerprint) {
        if self.entries.get(&of).is_some_and(|entry| entry.deaths < DEATHS_MAX)
            && let Some(entry) = self.entries.remove(&of)
        {
            self.order.remove(&entry.order);
        }
    }

    /// All that is over. Called at each death too.
    pub fn forget_old(&mut self, now: Instant) {
        // The order of deaths is the order of ends: all live equally long.
        while let Some((order, of)) = self.order.first_key_value().map(|(order, of)| (*order, *of)) {
            if self.entries.get(&of).is_some_and(|entry| entry.until > now) {
                return;
            }
            self.order.remove(&order);
            self.entries.remove(&of);
        }
    }
}

#[cfg(test)]
mod tests;
