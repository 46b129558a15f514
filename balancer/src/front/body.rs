//! Request bodies: one pre-sized buffer each, all of them together under one budget.
//!
//! **Invariant:** memory for a body is taken from the budget before it is allocated, and given back when the body goes.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use fovea_service::config::ByteSize;
use http::header;
use pingora_core::protocols::http::ServerSession;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::refusal::Refusal;
use crate::metrics::ErrorKind;

/// Budgets are counted in pieces of this many bytes.
const PIECE_BYTES: usize = 1 << 10;
/// A body of unknown length takes room in steps of this many bytes.
const STEP_BYTES: usize = 256 << 10;

/// Memory for all request bodies together.
pub struct Budget {
    pieces: Arc<Semaphore>,
    wait_max: Duration,
    in_use: Gauge,
}

/// One body's part of the budget.
pub struct Room {
    permit: OwnedSemaphorePermit,
    in_use: Gauge,
}

impl Room {
    fn bytes(&self) -> usize {
        self.permit.num_permits() * PIECE_BYTES
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.in_use.dec_by(signed(self.bytes()));
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl Budget {
    /// `in_use` shows the bytes taken.
    pub fn new(bytes: u64, wait_max: Duration, in_use: Gauge) -> Self {
        let pieces = usize::try_from(bytes).unwrap_or(usize::MAX) / PIECE_BYTES;
        Self { pieces: Arc::new(Semaphore::new(pieces.min(Semaphore::MAX_PERMITS))), wait_max, in_use }
    }

    async fn take(&self, bytes: usize) -> Option<Room> {
        let pieces = u32::try_from(bytes.div_ceil(PIECE_BYTES)).ok()?;
        let taken = Arc::clone(&self.pieces).acquire_many_owned(pieces);
        let permit = tokio::time::timeout(self.wait_max, taken).await.ok()?.ok()?;
        let room = Room { permit, in_use: self.in_use.clone() };
        room.in_use.inc_by(signed(room.bytes()));
        Some(room)
    }

    async fn grow(&self, room: &mut Room, bytes: usize) -> Option<()> {
        let mut more = self.take(bytes).await?;
        if let Some(permit) = more.permit.split(more.permit.num_permits()) {
            room.permit.merge(permit);
        }
        Some(())
    }
}

/// Reads the whole body, at most `body_max` of it.
///
/// # Errors
/// When it is too long (known before it is read, if the client tells the length), too slow, broken, or when the budget stays exhausted.
pub async fn read(
    client: &mut ServerSession,
    budget: &Budget,
    body_max: ByteSize,
    turn: u64,
) -> Result<(Bytes, Room), Refusal> {
    let bytes_max = usize::try_from(body_max.as_u64()).unwrap_or(usize::MAX);
    let told = told_length(client)?;
    if told.is_some_and(|told| told > bytes_max) {
        return Err(too_large(body_max));
    }
    let busy = || Refusal::busy(ErrorKind::BodyBudget, "too many request bodies in flight; try again soon", turn);
    let mut room = budget.take(told.unwrap_or(STEP_BYTES.min(bytes_max))).await.ok_or_else(busy)?;
    if client.req_header().headers.contains_key(header::EXPECT) {
        client.write_continue_response().await.map_err(|error| broken(&error))?;
    }
    let mut body = BytesMut::with_capacity(told.unwrap_or(0));
    while let Some(piece) = client.read_request_body().await.map_err(|error| broken(&error))? {
        let length = body.len() + piece.len();
        if length > bytes_max {
            return Err(too_large(body_max));
        }
        if length > room.bytes() {
            let more = (length - room.bytes()).max(STEP_BYTES);
            budget.grow(&mut room, more).await.ok_or_else(busy)?;
        }
        body.extend_from_slice(&piece);
        if client.is_body_done() {
            break;
        }
    }
    Ok((body.freeze(), room))
}

fn told_length(client: &ServerSession) -> Result<Option<usize>, Refusal> {
    let Some(value) = client.get_header(header::CONTENT_LENGTH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default();
    // Equal repeated values were let through by the HTTP layer.
    let length = text.split(',').next().and_then(|text| text.trim().parse().ok());
    length.map(Some).ok_or_else(|| Refusal::new(ErrorKind::BadRequest, "content-length is not a number"))
}

fn too_large(body_max: ByteSize) -> Refusal {
    let message = format!("request body is over the limit of {body_max}; send smaller images or link them by URL");
    Refusal::new(ErrorKind::BodyTooLarge, message)
}

fn broken(error: &pingora_core::Error) -> Refusal {
    match error.etype() {
        pingora_core::ErrorType::ReadTimedout => timed_out(),
        _ => Refusal::new(ErrorKind::BadRequest, "request body ended early or is badly framed"),
    }
}

/// The client was too slow.
pub fn timed_out() -> Refusal {
    Refusal::new(ErrorKind::BodyTimeout, "request body did not arrive in time")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_exhausted_budget_refuses_after_a_bounded_wait() {
        let gauge = Gauge::default();
        let budget = Budget::new(10 << 10, Duration::from_secs(3), gauge.clone());
        let mut room = budget.take(1).await.unwrap();
        budget.grow(&mut room, 8 << 10).await.unwrap();
        assert_eq!((room.bytes(), gauge.get()), (9 << 10, 9 << 10));
        assert!(budget.take(2 << 10).await.is_none());
        drop(room);
        assert_eq!(gauge.get(), 0);
        assert!(budget.take(10 << 10).await.is_some());
    }
}
