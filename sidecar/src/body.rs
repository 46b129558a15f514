//! The one body type of the request path, both ways, and a bounded read of a small one.

use std::time::Duration;

use bytes::Bytes;
use http_body::Body as _;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a body broke off. A type of its own, for the compiler cannot generalise over a bare boxed error in closures.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct BodyError(BoxError);

impl BodyError {
    /// One that passes through several bodies is wrapped once.
    pub fn new(error: impl Into<BoxError>) -> Self {
        error.into().downcast::<Self>().map_or_else(Self, |same| *same)
    }

    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

/// A request or response body, streamed frame by frame.
pub type Body = UnsyncBoxBody<Bytes, BodyError>;

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

pub fn empty() -> Body {
    full(Bytes::new())
}

/// Boxes any body.
pub fn boxed<B>(body: B) -> Body
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(BodyError::new).boxed_unsync()
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("longer than {limit} bytes")]
    TooLong { limit: usize },
    #[error("took longer than {limit:?}")]
    TooSlow { limit: Duration },
    #[error("broke off")]
    Broken(#[source] BoxError),
}

/// Takes the rest of a body that nobody wants, as far as it is short and quick: a connection closed before all was taken may lose the
/// answer that is on its way.
pub async fn pass_over(mut body: Body, limit: usize, time: Duration) {
    let rest = async {
        let mut left = limit;
        while let Some(Ok(frame)) = body.frame().await {
            let Some(after) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else { break };
            left = after;
        }
    };
    let _ = tokio::time::timeout(time, rest).await;
}

/// Reads a whole body of at most `limit` bytes within `time`.
///
/// # Errors
/// When it is longer, slower, or breaks off.
pub async fn read(body: Body, limit: usize, time: Duration) -> Result<Bytes, ReadError> {
    if body.size_hint().lower() > limit as u64 {
        return Err(ReadError::TooLong { limit });
    }
    match tokio::time::timeout(time, Limited::new(body, limit).collect()).await {
        Err(_) => Err(ReadError::TooSlow { limit: time }),
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ReadError::TooLong { limit }),
        Ok(Err(error)) => Err(ReadError::Broken(error)),
    }
}
