//! `strftime_now(format)` with the time of the request.

use jiff::civil::DateTime;
use minijinja::value::Value;
use minijinja::{Error, ErrorKind};

/// The function for one render.
pub(crate) fn function(now: DateTime) -> Value {
    Value::from_function(move |format: String| {
        let text = jiff::fmt::strtime::format(format, now);
        text.map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
    })
}
