//! An answer's body, within its bounds: encoding, length, budget, pixels.

use bytes::Bytes;
use fovea_media::header::{self, HeaderError, ImageHeader};
use http::header::{CONTENT_ENCODING, CONTENT_RANGE, HeaderMap, TRANSFER_ENCODING};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::client::Answer;
use super::deadline::by;
use super::error::Reason;
use super::gate::shrink;
use super::{Fetched, HEAD_MAX, Inner, Source, Want};

/// Longer files have their header read off the network's threads: a hostile one makes its reader see every byte.
const READ_HERE_MAX: usize = 256 << 10;
/// First allocation for a file of unknown length.
const GROW_FROM: usize = 64 << 10;

impl Want {
    /// For the `Range` header.
    pub(super) fn first(self) -> Option<u64> {
        match self {
            Self::Whole => None,
            Self::Head(bytes) => Some(bytes.into()),
        }
    }
}

/// Where to stop.
struct Bounds {
    /// Bytes to take.
    most: usize,
    /// The file may go on beyond `most`: the rest is not wanted.
    cut: bool,
}

/// Bytes in memory, with their share of the budget.
struct Held {
    data: Vec<u8>,
    gauge: Gauge,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.dec_by(gauge_value(&self.data));
    }
}

fn gauge_value(data: &[u8]) -> i64 {
    i64::try_from(data.len()).unwrap_or(i64::MAX)
}

/// Reads the file of a 200 or 206.
pub(super) async fn file(inner: &Inner, answer: Answer, want: Want, deadline: Instant) -> Result<Fetched, Reason> {
    let (response, address) = (&answer.response, answer.address);
    let status = response.status().as_u16();
    plain(response.headers())?;
    let announced = response.body().size_hint().exact();
    let body_max = inner.config.body_max.as_u64();
    let total = match status {
        206 => Some(range_total(response.headers()).ok_or(Reason::Protocol)?),
        _ => announced.map(Some),
    };
    if want == Want::Whole && announced.is_some_and(|length| length > body_max) {
        return Err(Reason::BodyTooLarge);
    }
    let bounds = match want {
        Want::Whole => Bounds { most: size(body_max), cut: false },
        Want::Head(first) if status == 206 => Bounds { most: first as usize, cut: true },
        // The origin knows no ranges: what comes anyway, up to the longest header.
        Want::Head(_) => Bounds { most: size(body_max.min(HEAD_MAX.into())), cut: true },
    };
    let reserve = announced.map_or(bounds.most, size).min(bounds.most);
    let mut permit = by(deadline, Reason::Busy, inner.budget.take(reserve as u64)).await?;
    let (mut answer, mut data) = (answer, Vec::new());
    let body = answer.response.body_mut();
    let ended = by(deadline, Reason::Timeout, collect(body, &bounds, reserve, &mut data)).await;
    inner.metrics.bytes.inc_by(data.len() as u64);
    let ended = ended??;
    drop(answer);
    data.shrink_to_fit();
    shrink(&mut permit, data.len() as u64);
    let length = total.flatten().or(ended.then_some(data.len() as u64));
    let complete = match status {
        206 => length == Some(data.len() as u64),
        _ => ended,
    };
    let gauge = inner.metrics.bytes_held.clone();
    gauge.inc_by(gauge_value(&data));
    let bytes = Bytes::from_owner(Held { data, gauge, _permit: permit });
    let header = image_header(&bytes).await;
    if pixels(&header, &bytes) > inner.config.pixels_max {
        return Err(Reason::Pixels);
    }
    Ok(Fetched { bytes, complete, length, header, etag: None, address, status, source: Source::Origin })
}

/// Takes the body into `data`; true when it came to its end.
async fn collect(body: &mut Incoming, bounds: &Bounds, expect: usize, data: &mut Vec<u8>) -> Result<bool, Reason> {
    data.reserve_exact(expect.min(GROW_FROM.max(body.size_hint().exact().map_or(0, size))));
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            tracing::debug!(%error, "media: body broke off");
            Reason::Protocol
        })?;
        // Trailers carry nothing for us.
        let Ok(piece) = frame.into_data() else { continue };
        let room = bounds.most - data.len();
        if piece.len() > room && !bounds.cut {
            return Err(Reason::BodyTooLarge);
        }
        let taken = &piece[..piece.len().min(room)];
        let needed = data.len() + taken.len();
        if needed > data.capacity() {
            // Doubled, but never beyond what the budget gave.
            data.reserve_exact((2 * data.len()).clamp(needed, bounds.most) - data.len());
        }
        data.extend_from_slice(taken);
        if bounds.cut && data.len() == bounds.most {
            return Ok(body.is_end_stream());
        }
    }
    Ok(true)
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// No coding that would have to be undone: a small answer stays small.
fn plain(headers: &HeaderMap) -> Result<(), Reason> {
    let all = |name, plain: &str| {
        headers.get_all(name).iter().all(|value| value.as_bytes().trim_ascii().eq_ignore_ascii_case(plain.as_bytes()))
    };
    if all(CONTENT_ENCODING, "identity") && all(TRANSFER_ENCODING, "chunked") {
        Ok(())
    } else {
        Err(Reason::ContentEncoding)
    }
}

/// Length of the whole file from `Content-Range: bytes 0-99/1234` (inner `None` = `*`); `None` for any other piece.
fn range_total(headers: &HeaderMap) -> Option<Option<u64>> {
    let range = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    let (_, total) = range.trim().strip_prefix("bytes 0-")?.split_once('/')?;
    if total == "*" { Some(None) } else { total.parse().ok().map(Some) }
}

/// Pixels that a decoder may make room for, damaged headers included.
fn pixels(header: &Result<ImageHeader, HeaderError>, bytes: &[u8]) -> u64 {
    let (width, height) = match header {
        Ok(header) => (header.width, header.height),
        Err(HeaderError::TooManyPixels { width, height }) => (*width, *height),
        // PNG decoders differ in whether they check the header's sum before they believe it.
        Err(_) => match bytes {
            [0x89, b'P', b'N', b'G', _, _, _, _, _, _, _, _, _, _, _, _, w0, w1, w2, w3, h0, h1, h2, h3, ..] => {
                (u32::from_be_bytes([*w0, *w1, *w2, *w3]), u32::from_be_bytes([*h0, *h1, *h2, *h3]))
            }
            _ => (0, 0),
        },
    };
    u64::from(width) * u64::from(height)
}

async fn image_header(bytes: &Bytes) -> Result<ImageHeader, HeaderError> {
    if bytes.len() <= READ_HERE_MAX {
        return header::read(bytes);
    }
    let bytes = bytes.clone();
    let read = tokio::task::spawn_blocking(move || header::read(&bytes));
    // Only at shutdown.
    read.await.unwrap_or(Err(HeaderError::Unknown))
}
