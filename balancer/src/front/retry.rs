//! How often a request may be sent to a second worker.

use std::sync::atomic::{AtomicU64, Ordering};

/// A second try elsewhere, kept to a share of all requests so that a sick pool is not asked twice for everything.
pub struct RetryBudget {
    percent: u64,
    /// Hundredths of a retry saved up.
    saved: AtomicU64,
}

/// Retries that can be saved up, in hundredths: a burst of ten after a quiet time.
const SAVED_MAX: u64 = 1_000;

impl RetryBudget {
    pub fn new(percent: u8) -> Self {
        let start = if percent == 0 { 0 } else { SAVED_MAX };
        Self { percent: u64::from(percent), saved: start.into() }
    }

    /// A request came.
    pub fn earn(&self) {
        let add = |saved: u64| Some((saved + self.percent).min(SAVED_MAX));
        let _ = self.saved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// May one be tried again?
    pub fn spend(&self) -> bool {
        let take = |saved: u64| saved.checked_sub(100);
        self.saved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_are_a_share_of_requests() {
        let budget = RetryBudget::new(10);
        let burst = (0..20).filter(|_| budget.spend()).count();
        (0..10).for_each(|_| budget.earn());
        assert_eq!((burst, budget.spend(), budget.spend()), (10, true, false));
        let none = RetryBudget::new(0);
        none.earn();
        assert!(!none.spend());
    }
}
