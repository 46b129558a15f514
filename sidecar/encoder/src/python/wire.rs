//! Frames between the sidecar and its Python worker: u32 LE length of a JSON object, u32 LE length of the bytes behind it, both.

use std::io::{self, ErrorKind, Read};

use serde_json::Value;

/// Longest JSON text of a worker, in bytes.
const TEXT_MAX: usize = 1 << 20;

/// Why no more frames come.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("it closed its socket")]
    Closed,
    #[error("it speaks another protocol: a frame of {text} + {blob} bytes")]
    Length { text: u32, blob: u32 },
    #[error("it speaks another protocol: no JSON object")]
    NoObject,
    #[error("its socket failed")]
    Io(#[source] io::Error),
}

/// Head and text of a frame that `blob_bytes` will follow.
pub fn head(message: &Value, blob_bytes: u32) -> Vec<u8> {
    let text = message.to_string();
    let mut frame = Vec::with_capacity(8 + text.len());
    frame.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
    frame.extend_from_slice(&blob_bytes.to_le_bytes());
    frame.extend_from_slice(text.as_bytes());
    frame
}

/// Puts frames together from a socket with a read time-out. Workers send no bytes behind the text.
#[derive(Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
}

impl FrameReader {
    /// The next object; `None` when the time-out passed first.
    pub fn read(&mut self, from: &mut impl Read) -> Result<Option<Value>, WireError> {
        loop {
            if let Some(value) = self.take()? {
                return Ok(Some(value));
            }
            let mut chunk = [0; 16 * 1024];
            match from.read(&mut chunk) {
                Ok(0) => return Err(WireError::Closed),
                Ok(bytes) => self.buffer.extend_from_slice(&chunk[..bytes]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(WireError::Io(error)),
            }
        }
    }

    fn take(&mut self) -> Result<Option<Value>, WireError> {
        let Some((head, rest)) = self.buffer.split_first_chunk::<8>() else { return Ok(None) };
        let [text, blob] = [&head[..4], &head[4..]].map(|b| b.try_into().map_or(0, u32::from_le_bytes));
        if text as usize > TEXT_MAX || blob != 0 {
            return Err(WireError::Length { text, blob });
        }
        let Some(bytes) = rest.get(..text as usize) else { return Ok(None) };
        let value: Value = serde_json::from_slice(bytes).map_err(|_| WireError::NoObject)?;
        self.buffer.drain(..8 + text as usize);
        if value.is_object() { Ok(Some(value)) } else { Err(WireError::NoObject) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Gives one byte at a time, with a time-out before each.
    struct Slow<'a>(&'a [u8], bool);

    impl Read for Slow<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            match (self.1, self.0.split_first()) {
                (true, _) => Err(ErrorKind::WouldBlock.into()),
                (false, None) => Ok(0),
                (false, Some((first, rest))) => {
                    (into[0], self.0) = (*first, rest);
                    Ok(1)
                }
            }
        }
    }

    #[test]
    fn a_frame_comes_whole_however_it_is_cut() {
        let (mut reader, mut found) = (FrameReader::default(), Vec::new());
        let bytes = [head(&json!({"a": 1}), 0), head(&json!({"b": "é"}), 0)].concat();
        let mut slow = Slow(&bytes, false);
        let end = loop {
            match reader.read(&mut slow) {
                Ok(value) => found.extend(value),
                Err(error) => break error,
            }
        };
        assert!(matches!(end, WireError::Closed));
        assert_eq!(found, [json!({"a": 1}), json!({"b": "é"})]);
    }

    proptest! {
        #[test]
        fn any_bytes_end_in_an_error_without_growing(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut reader = FrameReader::default();
            let mut from = &bytes[..];
            while reader.read(&mut from).is_ok() {}
            prop_assert!(reader.buffer.len() <= bytes.len());
        }
    }
}
