//! Rendered text with an upper limit.

use std::io;

use crate::error::RenderError;

/// Collects text up to a limit, and fails beyond it.
pub(super) struct Writer {
    text: Vec<u8>,
    max: usize,
}

impl Writer {
    pub fn new(max: usize) -> Self {
        Self { text: Vec::new(), max }
    }

    pub fn into_text(self) -> Result<String, RenderError> {
        String::from_utf8(self.text).map_err(|error| RenderError::Template { message: error.to_string() })
    }
}

impl io::Write for Writer {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if text.len() > self.max - self.text.len() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.text.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
