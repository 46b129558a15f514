//! What names a request for the quarantine: its path, and its body as it goes to a sidecar, without white space between tokens. Fetched
//! media stand in that body, so another file behind the same URL is another request.
//!
//! blake3, because a client must not be able to make a body that is taken for another client's.

use fovea_balancer_core::quarantine::Fingerprint;

use crate::prepare::ApiPath;

/// Strings are looked through in pieces of this many bytes: images are long and have neither quotes nor escapes.
const PIECE_BYTES: usize = 64;

/// Of a request's body. `tenant`: what one does with a body decides nothing for another.
pub fn of(path: ApiPath, tenant: u32, body: &[u8]) -> Fingerprint {
    let mut hasher = blake3::Hasher::new_derive_key("fovea balancer, quarantine, version 1");
    hasher.update(format!("{path:?} {tenant}\n").as_bytes());
    let mut rest = body;
    while !rest.is_empty() {
        let (token, after) = rest.split_at(token_bytes(rest));
        hasher.update(token);
        rest = &after[after.iter().take_while(|byte| byte.is_ascii_whitespace()).count()..];
    }
    Fingerprint(*hasher.finalize().as_bytes())
}

/// Bytes up to the next white space outside of a string; a string that begins before it is whole.
fn token_bytes(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => at += string_bytes(&text[at..]),
            byte if byte.is_ascii_whitespace() => break,
            _ => at += 1,
        }
    }
    at
}

/// Bytes of the string at the front, quotes included; all there are when it does not end.
fn string_bytes(text: &[u8]) -> usize {
    let is_special = |byte: &u8| *byte == b'"' || *byte == b'\\';
    let mut at = 1;
    loop {
        while let Some(piece) = text.get(at..at + PIECE_BYTES)
            && !piece.iter().fold(false, |found, byte| found | is_special(byte))
        {
            at += PIECE_BYTES;
        }
        match text.get(at) {
            Some(b'"') => return at + 1,
            Some(b'\\') => at += 2,
            Some(_) => at += 1,
            None => return text.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(body: &str) -> Fingerprint {
        of(ApiPath::ChatCompletions, 0, body.as_bytes())
    }

    #[test]
    fn white_space_counts_in_strings_only() {
        let plain = print(r#"{"a":"x y","b":[1,2]}"#);
        assert_eq!(plain, print(" { \"a\" :\n\"x y\",\t\"b\": [1, 2 ]}\r\n"));
        assert_ne!(plain, print(r#"{"a":"xy","b":[1,2]}"#));
        assert_ne!(plain, of(ApiPath::Completions, 0, br#"{"a":"x y","b":[1,2]}"#));
    }

    #[test]
    fn quotes_in_strings_do_not_end_them() {
        assert_ne!(print(r#"{"a":"x\" y"}"#), print(r#"{"a":"x\"y"}"#));
        let long = "A".repeat(1000);
        assert_eq!(print(&format!(r#"{{"a": "{long}\\", "b": 1}}"#)), print(&format!(r#"{{"a":"{long}\\","b":1}}"#)));
        assert_ne!(print(&format!(r#"{{"a":"{long} x"}}"#)), print(&format!(r#"{{"a":"{long}x"}}"#)));
    }

    #[test]
    fn bytes_of_any_kind_have_a_name() {
        for body in ["", "\"", "\"\\", "\"abc\\", "{\"a", "   "] {
            print(body);
        }
    }
}
