//! The engine's own model files, for balancers that have no copy of the model.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use fovea_gossip::model_files::FILE_BYTES_MAX;
use http::{HeaderValue, Response, header};
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::task::spawn_blocking;

use super::refusal::{Outcome, Refusal};
use crate::body::{self, Body};

/// Bytes read at a time: all that a download holds in memory.
const PIECE_BYTES: usize = 256 << 10;

/// The directory in force: `configured`, else the engine's model string where that is one. A relative one is not taken: it would be
/// relative to the engine's working directory, not to ours.
pub fn directory(configured: Option<&Path>, engine_model: Option<&str>) -> Option<PathBuf> {
    let told = || engine_model.map(Path::new).filter(|path| path.is_absolute());
    configured.or_else(told).map(Path::to_owned)
}

/// Answers with the file `name` of `dir`; `name` is one of the listed names.
pub async fn give(dir: Option<PathBuf>, name: &'static str) -> Result<Response<Body>, Refusal> {
    let path = dir.ok_or(Refusal::NoModelFile)?.join(name);
    let opened = spawn_blocking(move || open(&path)).await.unwrap_or_else(|panic| Err(io::Error::other(panic)));
    let (file, length) = opened.map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Refusal::NoModelFile,
        ErrorKind::FileTooLarge => Refusal::ModelFileTooLong { limit: FILE_BYTES_MAX },
        _ => Refusal::ModelFileUnreadable(error),
    })?;
    let mut response = Response::new(stream(file, length));
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    response.extensions_mut().insert(Outcome::Answered);
    Ok(response)
}

/// A regular file within the limit, and its length. Anything else is not opened: opening a pipe would wait.
fn open(path: &Path) -> io::Result<(File, u64)> {
    if !path.metadata()?.is_file() {
        return Err(ErrorKind::NotFound.into());
    }
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    if length > FILE_BYTES_MAX { Err(ErrorKind::FileTooLarge.into()) } else { Ok((file, length)) }
}

/// The first `length` bytes of `file`; the connection breaks off when it has become shorter.
fn stream(file: File, length: u64) -> Body {
    let pieces = futures_util::stream::try_unfold(file.take(length), |mut file| async {
        let read = spawn_blocking(move || {
            let mut piece = vec![0; PIECE_BYTES];
            let count = file.read(&mut piece)?;
            piece.truncate(count);
            io::Result::Ok((piece, file))
        });
        let (piece, file) = read.await.map_err(io::Error::other)??;
        io::Result::Ok((!piece.is_empty()).then(|| (Frame::data(Bytes::from(piece)), file)))
    });
    body::boxed(StreamBody::new(pieces))
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");

    #[tokio::test]
    async fn a_file_is_given_whole_with_its_length() {
        let response = give(Some(TINY.into()), "tokenizer.json").await.unwrap();
        let expect = std::fs::read(Path::new(TINY).join("tokenizer.json")).unwrap();
        assert_eq!(response.headers()[header::CONTENT_LENGTH], expect.len().to_string());
        assert!(response.into_body().collect().await.unwrap().to_bytes() == expect);
    }

    #[tokio::test]
    async fn what_is_not_there_is_said_to_be_absent() {
        let beside = Path::new(TINY).join("config.json");
        for (dir, name) in [
            (None, "config.json"),
            (Some(TINY.into()), "chat_template.jinja"),
            (Some(Path::new(TINY).join("no-such-folder")), "config.json"),
            (Some(beside), "config.json"),
            (Path::new(TINY).parent().map(Path::to_owned), "tiny-qwen3-vl"),
        ] {
            assert!(matches!(give(dir.clone(), name).await, Err(Refusal::NoModelFile)), "{dir:?} {name}");
        }
    }

    #[test]
    fn the_configured_directory_wins_over_the_engines_and_a_relative_one_is_not_guessed() {
        let check = |configured: Option<&str>, engine, expect: Option<&str>| {
            assert_eq!(directory(configured.map(Path::new), engine).as_deref(), expect.map(Path::new));
        };
        check(Some("/a"), Some("/b"), Some("/a"));
        check(Some("a"), None, Some("a"));
        check(None, Some("/b"), Some("/b"));
        check(None, Some("./b"), None);
        check(None, Some("Qwen/Qwen3-VL-8B-Instruct"), None);
        check(None, None, None);
    }
}
