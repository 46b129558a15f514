//! When a certificate ends, for metrics and the log. Trust never rests on what is read here.

use std::time::{Duration, SystemTime};

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// `notAfter` of a DER certificate (RFC 5280 §4.1), in seconds since 1970; `None` when it is not where it should be.
pub fn not_after(der: &[u8]) -> Option<i64> {
    let (_, certificate, _) = element(der)?;
    let (_, mut body, _) = element(certificate)?;
    if body.first() == Some(&VERSION) {
        body = element(body)?.2;
    }
    // Serial number, signature algorithm, issuer.
    for _ in 0..3 {
        body = element(body)?.2;
    }
    let (tag, validity, _) = element(body)?;
    let (_, _, after) = element(validity).filter(|_| tag == SEQUENCE)?;
    let (tag, text, _) = element(after)?;
    time(tag, std::str::from_utf8(text).ok()?)
}

/// Tag, content and rest of the first element.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (tag, rest) = der.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(*first), rest),
        0x81..=0x84 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((*tag, content, rest))
}

/// `YYMMDDhhmmssZ` or `YYYYMMDDhhmmssZ`.
fn time(tag: u8, text: &str) -> Option<i64> {
    let digits = text.strip_suffix('Z').filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    let (year, rest) = match tag {
        UTC_TIME if digits.len() == 12 => {
            let year: i64 = digits[..2].parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, &digits[2..])
        }
        GENERALIZED_TIME if digits.len() == 14 => (digits[..4].parse().ok()?, &digits[4..]),
        _ => return None,
    };
    let field = |at: usize| rest[at..at + 2].parse::<i64>().ok();
    let (month, day) = (field(0)?, field(2)?);
    let known = (1..=12).contains(&month) && (1..=31).contains(&day);
    known.then_some(days(year, month, day) * 86_400 + field(4)? * 3600 + field(6)? * 60 + field(8)?)
}

/// Days from 1970-01-01 in the Gregorian calendar, years counted from March so that the leap day ends one.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

/// Time left; `None` when it is over.
pub fn left(not_after: i64) -> Option<Duration> {
    let end = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(not_after).ok()?);
    end.duration_since(SystemTime::now()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(tag: u8, text: &str, expect: Option<i64>) {
        assert_eq!(time(tag, text), expect, "{text}");
    }

    /// As `date -u -d … +%s` says.
    #[test]
    fn times_are_seconds_since_1970() {
        check(UTC_TIME, "700101000000Z", Some(0));
        check(UTC_TIME, "240229235959Z", Some(1_709_251_199));
        check(UTC_TIME, "491231235959Z", Some(2_524_607_999));
        check(UTC_TIME, "991231235959Z", Some(946_684_799));
        check(GENERALIZED_TIME, "20500101000000Z", Some(2_524_608_000));
        check(GENERALIZED_TIME, "21000301000000Z", Some(4_107_542_400));
        check(GENERALIZED_TIME, "40960101000000Z", Some(67_090_118_400));
    }

    #[test]
    fn what_is_no_time_is_none() {
        for text in ["", "Z", "240229235959", "2402292359+0Z", "241301000000Z", "240132000000Z", "24013200000\u{e9}Z"] {
            check(UTC_TIME, text, None);
        }
    }

    #[test]
    fn cut_certificates_never_panic() {
        let der =
            [&[SEQUENCE, 0x84, 0xff, 0xff, 0xff, 0xff][..], &[SEQUENCE, 0x80], &[SEQUENCE, 3, SEQUENCE, 1, 0]].concat();
        for from in 0..der.len() {
            for to in from..der.len() {
                assert_eq!(not_after(&der[from..to]), None);
            }
        }
    }
}
