//! A token bucket in exact integers: no rounding adds up, however often it is asked.

use std::time::{Duration, Instant};

/// Parts of one unit: nanoseconds of a minute, so that a nanosecond at `per_minute` is a whole number of parts.
const PARTS: i128 = 60_000_000_000;

/// How fast a bucket fills, and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units per minute; 1 at least.
    pub per_minute: u64,
    /// Most units at once; 1 at least.
    pub burst: u64,
}

/// How long until there is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    For(Duration),
    /// More is asked for than the bucket ever holds.
    Never,
}

#[derive(Clone, Debug)]
pub struct Bucket {
    rate: Rate,
    /// Parts at hand; below 0 when more was used than was known beforehand.
    level: i128,
    at: Instant,
}

impl Bucket {
    pub fn full(rate: Rate, now: Instant) -> Self {
        debug_assert!(rate.per_minute > 0 && rate.burst > 0, "checked when the config is read");
        Self { rate, level: i128::from(rate.burst) * PARTS, at: now }
    }

    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Fills up to `now`; a `now` of the past changes nothing.
    pub fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.at);
        self.at = self.at.max(now);
        let parts = i128::try_from(passed.as_nanos()).unwrap_or(i128::MAX).saturating_mul(self.rate.per_minute.into());
        self.level = self.level.saturating_add(parts).min(self.full_level());
    }

    /// Whether `cost` is at hand. To be [refilled](Self::refill) first.
    ///
    /// # Errors
    /// How long it takes until it is.
    pub fn check(&self, cost: u64) -> Result<(), Wait> {
        let needed = i128::from(cost) * PARTS;
        match needed - self.level {
            short if short <= 0 => Ok(()),
            _ if needed > self.full_level() => Err(Wait::Never),
            short => Err(Wait::For(self.time(short))),
        }
    }

    /// Takes `cost`, into debt if it must.
    pub fn take(&mut self, cost: u64) {
        self.level = self.level.saturating_sub(i128::from(cost) * PARTS);
    }

    /// Gives back what was taken and not used.
    pub fn give(&mut self, unused: u64) {
        self.level = self.level.saturating_add(i128::from(unused) * PARTS).min(self.full_level());
    }

    /// Whole units at hand; 0 in debt.
    pub fn left(&self) -> u64 {
        u64::try_from(self.level.max(0) / PARTS).unwrap_or(u64::MAX)
    }

    /// Until it is full again, if nothing is taken.
    pub fn full_in(&self) -> Duration {
        self.time(self.full_level() - self.level)
    }

    fn full_level(&self) -> i128 {
        i128::from(self.rate.burst) * PARTS
    }

    /// Rounded up to a nanosecond.
    fn time(&self, parts: i128) -> Duration {
        let rate = i128::from(self.rate.per_minute.max(1));
        let nanos = (parts.max(0) + rate - 1) / rate;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}
