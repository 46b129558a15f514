//! `raise_exception(message)`: how a template refuses a conversation.

use minijinja::{Error, ErrorKind};

pub(super) fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}
