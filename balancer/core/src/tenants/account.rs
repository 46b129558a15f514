//! What one tenant, or one key of it, has used of what it may use. Its size does not depend on traffic.

use std::time::{Duration, Instant};

use super::bucket::{Bucket, Rate, Wait};

/// What may be used; `None` = as much as comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub requests: Option<Rate>,
    pub prompt_tokens: Option<Rate>,
    /// Requests at a time.
    pub concurrent: Option<u32>,
}

impl Limits {
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    Requests,
    PromptTokens,
    Concurrent,
}

/// A request is one too many, or too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    pub limit: Limit,
    /// What is allowed: per minute, or at a time.
    pub allowed: u64,
    /// `None` = until another request of the account ends.
    pub wait: Option<Wait>,
}

/// One limit at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// Per minute.
    pub limit: u64,
    pub left: u64,
    pub full_in: Duration,
}

/// How much is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    pub requests: Option<Level>,
    pub prompt_tokens: Option<Level>,
}

impl Standing {
    /// Of each limit the one of which less is left.
    #[must_use]
    pub fn tighter(self, other: Self) -> Self {
        let tighter = |a: Option<Level>, b: Option<Level>| match (a, b) {
            (Some(a), Some(b)) => Some(if b.left < a.left { b } else { a }),
            (a, b) => a.or(b),
        };
        let requests = tighter(self.requests, other.requests);
        Self { requests, prompt_tokens: tighter(self.prompt_tokens, other.prompt_tokens) }
    }
}

#[derive(Clone, Debug)]
pub struct Account {
    requests: Option<Bucket>,
    prompt_tokens: Option<Bucket>,
    concurrent: Option<u32>,
    running: u32,
}

impl Account {
    pub fn new(limits: Limits, now: Instant) -> Self {
        let full = |rate| Bucket::full(rate, now);
        let (requests, prompt_tokens) = (limits.requests.map(full), limits.prompt_tokens.map(full));
        Self { requests, prompt_tokens, concurrent: limits.concurrent, running: 0 }
    }

    /// Requests let in that have not [left](Self::leave).
    pub fn running(&self) -> u32 {
        self.running
    }

    fn refill(&mut self, now: Instant) {
        self.requests.iter_mut().chain(&mut self.prompt_tokens).for_each(|bucket| bucket.refill(now));
    }

    fn may_enter(&self) -> Result<(), Exceeded> {
        if let Some(most) = self.concurrent.filter(|most| self.running >= *most) {
            return Err(Exceeded { limit: Limit::Concurrent, allowed: most.into(), wait: None });
        }
        // Who has no token left is not worth the work of counting his prompt.
        may_take(self.prompt_tokens.as_ref(), 1, Limit::PromptTokens)?;
        may_take(self.requests.as_ref(), 1, Limit::Requests)
    }

    /// A request that was let in is over, however it ended.
    pub fn leave(&mut self) {
        debug_assert!(self.running > 0, "who leaves has entered");
        self.running = self.running.saturating_sub(1);
    }

    /// What was charged beforehand, and what was used in the end.
    pub fn settle(&mut self, charged: u64, used: u64, now: Instant) {
        let Some(bucket) = &mut self.prompt_tokens else { return };
        bucket.refill(now);
        bucket.give(charged.saturating_sub(used));
        bucket.take(used.saturating_sub(charged));
    }

    pub fn standing(&mut self, now: Instant) -> Standing {
        self.refill(now);
        let level =
            |bucket: &Bucket| Level { limit: bucket.rate().per_minute, left: bucket.left(), full_in: bucket.full_in() };
        Standing { requests: self.requests.as_ref().map(level), prompt_tokens: self.prompt_tokens.as_ref().map(level) }
    }
}

fn may_take(bucket: Option<&Bucket>, cost: u64, limit: Limit) -> Result<(), Exceeded> {
    let Some(bucket) = bucket else { return Ok(()) };
    let exceeded = |wait| Exceeded { limit, allowed: bucket.rate().per_minute, wait: Some(wait) };
    bucket.check(cost).map_err(exceeded)
}

/// Lets a request in: to all `accounts`, or to none.
///
/// # Errors
/// The first limit that speaks against it. A request at a time too many is not counted against the rate.
pub fn enter(accounts: &mut [&mut Account], now: Instant) -> Result<(), Exceeded> {
    accounts.iter_mut().for_each(|account| account.refill(now));
    accounts.iter().try_for_each(|account| account.may_enter())?;
    for account in accounts {
        account.running += 1;
        account.requests.iter_mut().for_each(|bucket| bucket.take(1));
    }
    Ok(())
}

/// Charges the prompt of a request that was let in: to all `accounts`, or to none.
///
/// # Errors
/// The first account without so many tokens.
pub fn charge(accounts: &mut [&mut Account], tokens: u64, now: Instant) -> Result<(), Exceeded> {
    accounts.iter_mut().for_each(|account| account.refill(now));
    let may = |account: &&mut Account| may_take(account.prompt_tokens.as_ref(), tokens, Limit::PromptTokens);
    accounts.iter().try_for_each(may)?;
    accounts.iter_mut().filter_map(|account| account.prompt_tokens.as_mut()).for_each(|bucket| bucket.take(tokens));
    Ok(())
}
