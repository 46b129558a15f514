//! What a batch and the queue may hold.

use std::num::NonZeroU32;

use crate::error::{EncodeError, ItemError};

/// Bounds of one encoder's batches and queue. Costs are in the encoder's unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Cost of one batch; `None`: everything that waits is one batch.
    pub(super) max_batch_cost: Option<NonZeroU32>,
    pub(super) max_batch_items: Option<NonZeroU32>,
    pub(super) max_queued_cost: u64,
    /// Ascending.
    buckets: Vec<u32>,
}

/// Why limits make no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    #[error("buckets must be numbers from 1, each greater than the one before")]
    Buckets,
    #[error("max_queued_cost must be at least max_batch_cost ({max_batch_cost})")]
    Queue { max_batch_cost: u32 },
    #[error("max_queued_cost must be at least 1")]
    NoQueue,
}

impl Limits {
    /// # Errors
    /// When the buckets do not ascend, or the queue holds less than a batch.
    pub fn new(
        max_batch_cost: Option<NonZeroU32>,
        max_batch_items: Option<NonZeroU32>,
        max_queued_cost: u64,
        buckets: Vec<u32>,
    ) -> Result<Self, LimitsError> {
        if buckets.first() == Some(&0) || !buckets.is_sorted_by(|a, b| a < b) {
            return Err(LimitsError::Buckets);
        }
        match max_batch_cost {
            Some(max) if max_queued_cost < max.get().into() => Err(LimitsError::Queue { max_batch_cost: max.get() }),
            _ if max_queued_cost == 0 => Err(LimitsError::NoQueue),
            _ => Ok(Self { max_batch_cost, max_batch_items, max_queued_cost, buckets }),
        }
    }

    /// Cost of a whole request, when it can ever be served.
    pub(super) fn check(&self, costs: impl Iterator<Item = u32>) -> Result<u64, EncodeError> {
        let mut sum = 0;
        for (index, cost) in costs.enumerate() {
            if cost == 0 {
                let error = ItemError::Internal("cost is 0, wanted a number from 1".to_owned());
                return Err(EncodeError::Item { index: Some(index), error });
            }
            if let Some(max) = self.max_batch_cost.filter(|max| cost > max.get()) {
                let error = ItemError::TooLarge { cost: cost.into(), max: max.get().into() };
                return Err(EncodeError::Item { index: Some(index), error });
            }
            sum += u64::from(cost);
        }
        if sum > self.max_queued_cost {
            let error = ItemError::TooLarge { cost: sum, max: self.max_queued_cost };
            return Err(EncodeError::Item { index: None, error });
        }
        Ok(sum)
    }

    /// Whether one more image fits beside `items` images of `cost` together.
    pub(super) fn fits(&self, items: usize, cost: u64, more: u32) -> bool {
        self.max_batch_cost.is_none_or(|max| cost + u64::from(more) <= max.get().into())
            && self.max_batch_items.is_none_or(|max| items < max.get() as usize)
    }

    pub(super) fn bucket(&self, cost: u64) -> Option<u32> {
        self.buckets.iter().copied().find(|&bucket| u64::from(bucket) >= cost)
    }
}
