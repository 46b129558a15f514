//! One budget for all bodies held at a moment: a permit per KiB, given back when the body is gone.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::refusal::Refusal;
use crate::body::{Body, BodyError};

const UNIT_BYTES: u64 = 1024;

#[derive(Clone, Debug)]
pub struct Budget {
    room: Arc<Semaphore>,
    /// Longest wait for room.
    wait: Duration,
}

/// Room taken by one body.
#[derive(Debug)]
pub struct Held {
    permit: Option<OwnedSemaphorePermit>,
    bytes: u64,
}

impl Budget {
    pub fn new(bytes_max: u64, wait: Duration) -> Self {
        let units = usize::try_from(bytes_max / UNIT_BYTES).unwrap_or(usize::MAX).clamp(1, Semaphore::MAX_PERMITS);
        Self { room: Arc::new(Semaphore::new(units)), wait }
    }

    /// Bytes free at this moment.
    pub fn free_bytes(&self) -> u64 {
        self.room.available_permits() as u64 * UNIT_BYTES
    }

    /// Takes room for `bytes`, waiting at most the time of this budget.
    pub async fn take(&self, bytes: u64) -> Result<Held, Refusal> {
        let mut held = Held { permit: None, bytes: 0 };
        self.grow(&mut held, bytes).await?;
        Ok(held)
    }

    /// Raises what is held to `bytes`.
    pub async fn grow(&self, held: &mut Held, bytes: u64) -> Result<(), Refusal> {
        if bytes <= held.bytes {
            return Ok(());
        }
        let units = bytes.div_ceil(UNIT_BYTES) - held.bytes.div_ceil(UNIT_BYTES);
        if units > 0 {
            let units = u32::try_from(units).map_err(|_| Refusal::NoRoom)?;
            let taken = tokio::time::timeout(self.wait, Arc::clone(&self.room).acquire_many_owned(units)).await;
            let permit = taken.ok().and_then(Result::ok).ok_or(Refusal::NoRoom)?;
            match &mut held.permit {
                Some(old) => old.merge(permit),
                none => *none = Some(permit),
            }
        }
        held.bytes = bytes;
        Ok(())
    }
}

/// A whole body that holds its room until its bytes are handed on.
pub struct HeldBody {
    bytes: Bytes,
    held: Option<Held>,
}

impl HeldBody {
    pub fn new(bytes: Bytes, held: Held) -> Self {
        Self { bytes, held: Some(held) }
    }

    pub fn boxed(self) -> Body {
        crate::body::boxed(self)
    }
}

impl http_body::Body for HeldBody {
    type Data = Bytes;
    type Error = BodyError;

    /// Hands the bytes on in pieces, so that the room stays taken until most of them are written.
    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        const PIECE: usize = 256 << 10;
        if self.bytes.is_empty() {
            self.held = None;
            return Poll::Ready(None);
        }
        let piece = self.bytes.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.bytes.split_to(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn room_is_given_back_and_never_exceeded() {
        let budget = Budget::new(4096, Duration::from_secs(1));
        let mut first = budget.take(1000).await.unwrap();
        budget.grow(&mut first, 3000).await.unwrap();
        assert_eq!(budget.free_bytes(), 1024);
        assert!(matches!(budget.take(2000).await, Err(Refusal::NoRoom)));
        drop(first);
        assert!(budget.take(4096).await.is_ok());
        assert!(matches!(budget.take(5000).await, Err(Refusal::NoRoom)));
    }

    #[tokio::test]
    async fn a_body_holds_its_room_until_it_is_gone() {
        let budget = Budget::new(1 << 20, Duration::from_secs(1));
        let held = budget.take(600 << 10).await.unwrap();
        let body = HeldBody::new(Bytes::from(vec![7; 600 << 10]), held).boxed();
        assert_eq!(budget.free_bytes(), 424 << 10);
        assert_eq!(body.collect().await.unwrap().to_bytes().len(), 600 << 10);
        assert_eq!(budget.free_bytes(), 1 << 20);
    }
}
