//! Requests to the engine, each within a limit of time and length, and all within the run's own limit.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, header};
use serde_json::Value;
use tokio::time::Instant;

use super::check::{chain, shown};
use crate::body;
use crate::engine::discover::{EngineClient, Pages};

/// Longest answer that is read, in bytes. Each answer of the probe has one token; an event queue may be long.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// The engine, and until when it may be asked.
pub struct Ask {
    pub client: EngineClient,
    /// Base URL.
    pub base: String,
    pub deadline: Instant,
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// From the request to the head of the answer.
    pub took: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("{0}")]
    Unreachable(String),
    #[error("no answer within {0:?}")]
    TooSlow(Duration),
}

impl Ask {
    /// The smaller of this and what is left of the run.
    pub fn limit(&self, most: Duration) -> Duration {
        most.min(self.deadline.saturating_duration_since(Instant::now()))
    }

    /// Pages by the code of discovery, each within `most`.
    pub fn pages(&self, most: Duration) -> Pages<'_> {
        Pages { client: &self.client, base: &self.base, limit: self.limit(most) }
    }

    /// # Errors
    /// Nobody answers, or not in time, or without end.
    pub async fn bare(&self, method: Method, path: &str, most: Duration) -> Result<Answer, AskError> {
        self.send(Request::builder().method(method), path, Bytes::new(), most).await
    }

    /// Posts JSON; `rank` pins a data-parallel rank.
    ///
    /// # Errors
    /// As [`Self::bare`].
    pub async fn post(&self, path: &str, json: &Value, rank: Option<u32>, most: Duration) -> Result<Answer, AskError> {
        let mut request = Request::builder().method(Method::POST).header(header::CONTENT_TYPE, "application/json");
        if let Some(rank) = rank {
            request = request.header("x-data-parallel-rank", rank);
        }
        self.send(request, path, json.to_string().into(), most).await
    }

    async fn send(
        &self,
        request: http::request::Builder,
        path: &str,
        bytes: Bytes,
        most: Duration,
    ) -> Result<Answer, AskError> {
        let limit = self.limit(most);
        let uri = format!("{}{path}", self.base.trim_end_matches('/'));
        let request = request.uri(uri).body(body::full(bytes)).map_err(|error| AskError::Unreachable(chain(&error)))?;
        let began = Instant::now();
        let answer = tokio::time::timeout(limit, self.client.request(request)).await;
        let answer = answer.map_err(|_| AskError::TooSlow(limit))?;
        let (head, incoming) = answer.map_err(|error| AskError::Unreachable(chain(&error)))?.into_parts();
        let took = began.elapsed();
        let body = body::read(body::boxed(incoming), ANSWER_BYTES_MAX, limit).await;
        let body = body.map_err(|error| AskError::Unreachable(format!("the answer: {}", chain(&error))))?;
        Ok(Answer { status: head.status, headers: head.headers, body, took })
    }
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// What the engine says of an error: `error.message`, `message`, or the text.
    pub fn message(&self) -> String {
        let json = self.json();
        let said = json.pointer("/error/message").or_else(|| json.get("message")).and_then(Value::as_str);
        shown(said.unwrap_or(&String::from_utf8_lossy(&self.body)))
    }
}

/// Unix seconds of an HTTP date, `Sun, 06 Nov 1994 08:49:37 GMT`; the form that all servers send.
pub fn http_date(text: &str) -> Option<i64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let parts: Vec<&str> = text.split_ascii_whitespace().collect();
    let [_, day, month, year, time, "GMT"] = parts[..] else { return None };
    let month = i64::try_from(MONTHS.iter().position(|name| *name == month)?).ok()? + 1;
    let number = |text: &str, most: i64| text.parse::<i64>().ok().filter(|n| (0..=most).contains(n));
    let (day, year) = (number(day, 31)?, number(year, 9999)?);
    let mut clock = time.split(':').map(|part| number(part, 60));
    let (hours, minutes, seconds) = (clock.next()??, clock.next()??, clock.next()??);
    // Days since 1970 of a Gregorian date, with years that begin in March.
    let (year, shifted) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = days + (153 * shifted + 2) / 5 + day - 1 - 719_468;
    Some(days * 86_400 + hours * 3600 + minutes * 60 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_dates_are_read_and_others_are_not() {
        for (text, expect) in [
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777)),
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0)),
            ("Thu, 29 Feb 2024 12:00:00 GMT", Some(1_709_208_000)),
            ("Tue, 31 Dec 2199 23:59:59 GMT", Some(7_258_118_399)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", None),
            ("Sun, 06 Nov 1994 08:49:37 CET", None),
            ("Sun, 06 Foo 1994 08:49:37 GMT", None),
            ("Sun, 99 Nov 1994 08:49:37 GMT", None),
            ("Sun, 06 Nov 1994 08:49 GMT", None),
            ("", None),
        ] {
            assert_eq!(http_date(text), expect, "{text}");
        }
    }
}
