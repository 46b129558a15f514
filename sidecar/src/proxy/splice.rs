//! A request body on its way to the engine, with cuts and insertions applied as it passes: nothing is gathered.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use fovea_openai::edit::{Piece, Splicer};
use http_body::{Frame, SizeHint};

use crate::body::{Body, BodyError};

/// The client's body after its preamble.
pub struct Spliced {
    /// Bytes that came in one frame with the end of the preamble.
    first: Bytes,
    rest: Body,
    /// `None` once the last edits are out.
    splicer: Option<Splicer>,
    ready: VecDeque<Bytes>,
    /// Bytes still to come out, when the client told the length.
    left: Option<u64>,
    /// Bytes that came in.
    seen: u64,
    bounds: Bounds,
}

/// What the length of the client's body must lie within.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// End of the last edit.
    pub least: u64,
    pub most: u64,
}

/// A body of a length that was not told beforehand turned out wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LengthError {
    #[error("body is longer than {limit} bytes")]
    TooLong { limit: u64 },
    #[error("an edit lies beyond the end of the body")]
    EditBeyondEnd,
}

impl Bounds {
    pub fn check(self, len: u64) -> Result<(), LengthError> {
        match len {
            _ if len > self.most => Err(LengthError::TooLong { limit: self.most }),
            _ if len < self.least => Err(LengthError::EditBeyondEnd),
            _ => Ok(()),
        }
    }
}

impl Spliced {
    pub fn new(first: Bytes, rest: Body, splicer: Splicer, new_len: Option<u64>, bounds: Bounds) -> Self {
        Self { first, rest, splicer: Some(splicer), ready: VecDeque::new(), left: new_len, seen: 0, bounds }
    }

    fn feed(&mut self, chunk: &Bytes) -> Result<(), LengthError> {
        self.seen += chunk.len() as u64;
        // More may come: only too much is wrong yet.
        self.bounds.check(self.seen.max(self.bounds.least))?;
        let Some(splicer) = &mut self.splicer else { return Ok(()) };
        let ready = &mut self.ready;
        splicer.feed(chunk, |piece| {
            ready.push_back(match piece {
                Piece::Kept(range) => chunk.slice(range),
                Piece::Inserted(bytes) => Bytes::copy_from_slice(bytes),
            });
        });
        Ok(())
    }

    fn finish(&mut self) -> Result<(), LengthError> {
        let splicer = self.splicer.take();
        self.bounds.check(self.seen)?;
        let ready = &mut self.ready;
        splicer.into_iter().for_each(|s| s.finish(|bytes| ready.push_back(Bytes::copy_from_slice(bytes))));
        Ok(())
    }
}

impl http_body::Body for Spliced {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                self.left = self.left.map(|left| left.saturating_sub(piece.len() as u64));
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            if self.splicer.is_none() {
                return Poll::Ready(None);
            }
            if !self.first.is_empty() {
                let chunk = std::mem::take(&mut self.first);
                self.feed(&chunk).map_err(BodyError::new)?;
                continue;
            }
            match ready!(Pin::new(&mut self.rest).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    // Trailers of a request mean nothing to an engine.
                    if let Ok(chunk) = frame.into_data() {
                        self.feed(&chunk).map_err(BodyError::new)?;
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.finish().map_err(BodyError::new)?,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.splicer.is_none() && self.ready.is_empty() && self.first.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map(SizeHint::with_exact).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use fovea_openai::edit::Edits;
    use http_body::Body as _;
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    fn chunks(text: &'static str, size: usize) -> Body {
        let frames: Vec<_> =
            text.as_bytes().chunks(size).map(|c| Ok::<_, BodyError>(Frame::data(Bytes::from_static(c)))).collect();
        StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync()
    }

    #[tokio::test]
    async fn edits_are_the_same_however_the_body_is_cut() {
        let body = r#"{"a":{"uuid":"x","b":1},"c":2}"#;
        let edits = || Edits::new(std::iter::once(6..17), [(6, b"\"uuid\":\"id\",".to_vec())]).unwrap();
        let expect = r#"{"a":{"uuid":"id","b":1},"c":2}"#;
        for size in 1..=body.len() {
            let (first, rest) = body.split_at(size.min(5));
            let len = edits().new_len(body.len() as u64);
            let spliced = Spliced::new(
                Bytes::from_static(first.as_bytes()),
                chunks(rest, size),
                Splicer::new(edits()),
                Some(len),
                Bounds { least: 17, most: body.len() as u64 },
            );
            assert_eq!(spliced.size_hint().exact(), Some(expect.len() as u64));
            assert_eq!(spliced.collect().await.unwrap().to_bytes(), expect);
        }
    }

    #[tokio::test]
    async fn a_length_out_of_bounds_breaks_the_body_off() {
        for (least, most, expect) in
            [(4, 4, None), (5, 9, Some(LengthError::EditBeyondEnd)), (0, 3, Some(LengthError::TooLong { limit: 3 }))]
        {
            let splicer = Splicer::new(Edits::default());
            let bounds = Bounds { least, most };
            let spliced = Spliced::new(Bytes::from_static(b"ab"), chunks("cd", 1), splicer, None, bounds);
            let failed = spliced.collect().await.err();
            assert_eq!(failed.map(|error| *error.downcast_ref::<LengthError>().unwrap()), expect, "{least} {most}");
        }
    }

    #[tokio::test]
    async fn an_insertion_at_the_end_and_an_unknown_length_work() {
        let edits = Edits::new([], [(2, b"!".to_vec())]).unwrap();
        let bounds = Bounds { least: 2, most: 2 };
        let spliced = Spliced::new(Bytes::new(), chunks("{}", 1), Splicer::new(edits), None, bounds);
        assert_eq!(spliced.size_hint().exact(), None);
        assert_eq!(spliced.collect().await.unwrap().to_bytes(), "{}!");
    }
}
