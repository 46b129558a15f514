//! Logs on stderr, as text or JSON lines. Records of the `log` crate are taken too.

use std::io::IsTerminal;

use serde::Deserialize;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{Invalid, Validate};

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    pub format: LogFormat,
    /// Levels by module, e.g. `info,fovea_balancer=debug`.
    pub filter: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, filter: "info".to_owned() }
    }
}

impl Validate for LogConfig {
    fn validate(&self) -> Result<(), Invalid> {
        self.parse_filter().map(drop)
    }
}

impl LogConfig {
    fn parse_filter(&self) -> Result<EnvFilter, Invalid> {
        EnvFilter::builder().parse(&self.filter).map_err(|error| {
            Invalid::new(
                "filter",
                format!("`{}`: {error}", self.filter),
                "write levels such as `info,fovea_balancer=debug`",
            )
        })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    #[default]
    Text,
    /// One object a line.
    Json,
}

#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("log.{0}")]
    Filter(#[from] Invalid),
    #[error("logs are set up already; call `telemetry::init` once")]
    Twice,
}

/// Sets up the logs of this process.
///
/// # Errors
/// When the filter is wrong, or logs are set up already.
pub fn init(config: &LogConfig) -> Result<(), TelemetryError> {
    let filter = config.parse_filter()?;
    let ansi = std::io::stderr().is_terminal();
    subscriber(config.format, filter, ansi, std::io::stderr).try_init().map_err(|_| TelemetryError::Twice)
}

fn subscriber<W>(format: LogFormat, filter: EnvFilter, ansi: bool, writer: W) -> tracing::Dispatch
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    // An error of the writer would be told on stderr, which panics where that is what cannot be written: a full disk.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(ansi)
        .with_writer(writer)
        .log_internal_errors(false);
    match format {
        LogFormat::Text => builder.finish().into(),
        LogFormat::Json => builder.json().flatten_event(true).finish().into(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn json_logs_are_one_object_a_line_and_filtered() {
        let buffer = Buffer::default();
        let out = buffer.clone();
        let config = LogConfig { format: LogFormat::Json, ..LogConfig::default() };
        let filter = config.parse_filter().unwrap();
        tracing::dispatcher::with_default(&subscriber(config.format, filter, false, move || out.clone()), || {
            tracing::debug!("left out");
            tracing::warn!(worker = 3, "event gap");
        });
        let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["worker"], &line["message"]), (&3.into(), &"event gap".into()));
    }

    #[test]
    fn a_wrong_filter_is_named() {
        let config = LogConfig { filter: "fovea=loud".to_owned(), ..LogConfig::default() };
        assert!(config.validate().unwrap_err().to_string().starts_with("filter: `fovea=loud`"));
    }

    #[test]
    fn logs_are_set_up_once() {
        init(&LogConfig::default()).unwrap();
        log::info!("taken from the log crate");
        assert!(matches!(init(&LogConfig::default()), Err(TelemetryError::Twice)));
    }
}
