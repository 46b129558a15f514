//! One encoding that several requests wait for.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::{CacheKey, EmbeddingCache, Look, Shared};
use crate::tensor::Checked;

/// What the leader of a flight has said so far.
#[derive(Clone, Debug)]
pub(super) enum Answer<E> {
    Pending,
    Rows(Arc<Checked>),
    Failed(E),
}

/// The one who encodes. Dropped without a word, it makes all who wait look again.
#[derive(Debug)]
#[must_use = "others wait for what the leader says"]
pub struct Leader<E> {
    shared: Arc<Shared<E>>,
    key: CacheKey,
    told: watch::Sender<Answer<E>>,
    ended: bool,
}

/// One who waits for a leader.
#[derive(Debug)]
pub struct Joiner<E>(watch::Receiver<Answer<E>>);

/// How waiting ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Joined<E> {
    Rows(Arc<Checked>),
    Failed(E),
    /// The leader went away: look again.
    Again,
    TooSlow,
}

impl<E> Leader<E> {
    pub(super) fn new(shared: Arc<Shared<E>>, key: CacheKey, told: watch::Sender<Answer<E>>) -> Self {
        Self { shared, key, told, ended: false }
    }

    pub fn key(&self) -> &CacheKey {
        &self.key
    }

    /// Keeps the rows and gives them to all who wait.
    pub fn finish(mut self, rows: Arc<Checked>) {
        self.end(Some(&rows));
        self.told.send_replace(Answer::Rows(rows));
    }

    /// Tells all who wait why there are none. The next look-up leads again.
    pub fn fail(mut self, error: E) {
        self.end(None);
        self.told.send_replace(Answer::Failed(error));
    }

    fn end(&mut self, rows: Option<&Arc<Checked>>) {
        self.ended = true;
        self.shared.end_flight(&self.key, rows);
    }
}

impl<E> Drop for Leader<E> {
    fn drop(&mut self) {
        if !self.ended {
            // Before the channel closes, so that those who look again find no flight.
            self.shared.end_flight(&self.key, None);
        }
    }
}

impl<E: Clone> Joiner<E> {
    pub(super) fn new(told: watch::Receiver<Answer<E>>) -> Self {
        Self(told)
    }

    /// Waits for the leader's word, at most `wait_max`. Cancel-safe.
    pub async fn wait(mut self, wait_max: Duration) -> Joined<E> {
        let said = timeout(wait_max, self.0.wait_for(|answer| !matches!(answer, Answer::Pending))).await;
        match said {
            Err(_) => Joined::TooSlow,
            Ok(Err(_)) => Joined::Again,
            Ok(Ok(answer)) => match &*answer {
                Answer::Rows(rows) => Joined::Rows(Arc::clone(rows)),
                Answer::Failed(error) => Joined::Failed(error.clone()),
                Answer::Pending => Joined::Again,
            },
        }
    }
}

/// Why there are no rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GetError<E> {
    #[error("image cannot be encoded")]
    Failed(E),
    #[error("another request encodes the same image and took longer than {wait_ms} ms")]
    TooSlow { wait_ms: u128 },
}

impl<E: Clone + Send + Sync> EmbeddingCache<E> {
    /// Rows of one image: from the cache, from another request that encodes it, or from `encode`. Dropping the future while it encodes
    /// lets one of those who wait encode in its place.
    ///
    /// # Errors
    /// What `encode` said, here or in the request that was joined, or that waiting took longer than `wait_max` in all.
    pub async fn get<F: Future<Output = Result<Arc<Checked>, E>>>(
        &self,
        key: CacheKey,
        wait_max: Duration,
        encode: impl FnOnce() -> F,
    ) -> Result<Arc<Checked>, GetError<E>> {
        let until = tokio::time::Instant::now() + wait_max;
        loop {
            let joiner = match self.look(key) {
                Look::Hit(rows) => return Ok(rows),
                Look::Join(joiner) => joiner,
                Look::Lead(leader) => {
                    return match encode().await {
                        Ok(rows) => {
                            leader.finish(Arc::clone(&rows));
                            Ok(rows)
                        }
                        Err(error) => {
                            leader.fail(error.clone());
                            Err(GetError::Failed(error))
                        }
                    };
                }
            };
            match joiner.wait(until.saturating_duration_since(tokio::time::Instant::now())).await {
                Joined::Rows(rows) => return Ok(rows),
                Joined::Failed(error) => return Err(GetError::Failed(error)),
                Joined::TooSlow => return Err(GetError::TooSlow { wait_ms: wait_max.as_millis() }),
                // Each round ends one leader, and the deadline ends the rounds.
                Joined::Again => (),
            }
        }
    }
}
