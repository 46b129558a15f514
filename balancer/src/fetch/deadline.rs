//! The one deadline that all waits of a fetch share.

use tokio::time::{Instant, timeout_at};

use super::error::Reason;

/// The result, or `late` when the deadline comes first.
pub(super) async fn by<T>(deadline: Instant, late: Reason, work: impl Future<Output = T>) -> Result<T, Reason> {
    timeout_at(deadline, work).await.map_err(|_| late)
}
