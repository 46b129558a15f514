//! `data:` URLs as vLLM reads them: `data:[<type>][;<parameter>]*;base64,<data>`, base64 strict (`validate=True`).

use crate::header::Format;

/// Why a URL is no usable `data:` URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataUrlError {
    #[error("image url does not start with data:")]
    Scheme,
    #[error("data url has no comma between its type and its data")]
    Comma,
    #[error("data url is not base64: write data:<type>;base64,<data>")]
    Encoding,
    #[error("data url holds invalid base64: use the standard alphabet with padding and no white space")]
    Base64,
}

/// Whether vLLM takes this for a `data:` URL.
pub fn is_data_url(url: &str) -> bool {
    url.as_bytes().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"data:"))
}

/// Decodes the bytes of a `data:` URL.
///
/// # Errors
/// Exactly where vLLM answers 400.
pub fn decode(url: &str) -> Result<Vec<u8>, DataUrlError> {
    if !is_data_url(url) {
        return Err(DataUrlError::Scheme);
    }
    let (kind, data) = url[5..].split_once(',').ok_or(DataUrlError::Comma)?;
    if kind.rsplit_once(';').is_none_or(|(_, encoding)| encoding != "base64") {
        return Err(DataUrlError::Encoding);
    }
    base64(data.as_bytes()).ok_or(DataUrlError::Base64)
}

/// A `data:` URL of an image file; its type is that of the bytes, as far as they tell.
pub fn encode(bytes: &[u8]) -> String {
    let kind = match crate::header::format(bytes) {
        Some(Format::Avif) => "image/avif",
        Some(Format::Bmp) => "image/bmp",
        Some(Format::Gif) => "image/gif",
        Some(Format::Jpeg) => "image/jpeg",
        Some(Format::Png) => "image/png",
        Some(Format::Tiff) => "image/tiff",
        Some(Format::WebP) => "image/webp",
        _ => "application/octet-stream",
    };
    let mut url = format!("data:{kind};base64,");
    base64_simd::STANDARD.encode_append(bytes, &mut url);
    url
}

/// Strict base64, except that the unused bits of the last digit may be set, which pybase64 allows.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let Some((head, &last)) = text.split_last_chunk::<4>() else {
        return text.is_empty().then(Vec::new);
    };
    let digit = |byte: u8| ALPHABET.iter().position(|&known| known == byte).and_then(|value| u32::try_from(value).ok());
    let (used, kept) = match last {
        [a, b, b'=', b'='] => ([a, b, b'A', b'A'], 1),
        [a, b, c, b'='] => ([a, b, c, b'A'], 2),
        whole => (whole, 3),
    };
    let mut bits = 0;
    for byte in used {
        bits = bits << 6 | digit(byte)?;
    }
    if !head.len().is_multiple_of(4) {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    base64_simd::STANDARD_NO_PAD.decode_append(head, &mut bytes).ok()?;
    bytes.extend_from_slice(&bits.to_be_bytes()[1..1 + kept]);
    Some(bytes)
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rows: &[(&str, Result<&[u8], DataUrlError>)]) {
        for (url, expect) in rows {
            assert_eq!(decode(url).as_deref(), expect.as_ref().copied(), "{url}");
        }
    }

    #[test]
    fn base64_is_read_as_pybase64_does() {
        check(&[
            ("data:image/png;base64,QQ==", Ok(b"A")),
            ("data:;base64,QR==", Ok(b"A")),
            ("data:;base64,QUJDQUJ=", Ok(b"ABCAB")),
            ("data:;base64,", Ok(b"")),
            ("DATA:image/png;charset=x;base64,QUJD", Ok(b"ABC")),
        ]);
        for bad in
            ["QQ", "QQ=", "QQ===", "QQ==QQ==", "QU I=", " QUI=", "QUI=\n", "QU-_", "=", "====", "Q===", "é", "QQ=A"]
        {
            assert_eq!(decode(&format!("data:;base64,{bad}")), Err(DataUrlError::Base64), "{bad}");
        }
    }

    #[test]
    fn the_head_must_end_in_base64() {
        check(&[
            ("http://x/y.png", Err(DataUrlError::Scheme)),
            ("dat", Err(DataUrlError::Scheme)),
            ("daté:;base64,QQ==", Err(DataUrlError::Scheme)),
            ("data:image/png;base64", Err(DataUrlError::Comma)),
            ("data:image/png,QQ==", Err(DataUrlError::Encoding)),
            ("data:base64,QQ==", Err(DataUrlError::Encoding)),
            ("data:image/png;BASE64,QQ==", Err(DataUrlError::Encoding)),
            ("data:image/png;base64;x=y,QQ==", Err(DataUrlError::Encoding)),
        ]);
    }
}
