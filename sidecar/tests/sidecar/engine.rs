//! A scripted engine: answers with what it was sent, or never; and tells when a request's client left.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

type Body = UnsyncBoxBody<Bytes, Infallible>;

#[derive(Debug, PartialEq, Eq)]
pub enum Note {
    Began,
    Left,
}

pub struct Engine {
    pub address: SocketAddr,
    pub notes: mpsc::UnboundedReceiver<Note>,
    /// Pieces of the answer to `/v1/completions`, one send each; the answer ends when this is dropped.
    pub pieces: Option<mpsc::Sender<&'static str>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Script {
    notes: mpsc::UnboundedSender<Note>,
    pieces: tokio::sync::Mutex<Option<mpsc::Receiver<&'static str>>>,
}

struct Leaving(mpsc::UnboundedSender<Note>);

impl Drop for Leaving {
    fn drop(&mut self) {
        let _ = self.0.send(Note::Left);
    }
}

impl Engine {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, notes) = mpsc::unbounded_channel();
        let (pieces, receiver) = mpsc::channel(1);
        let script = Arc::new(Script { notes: sender, pieces: tokio::sync::Mutex::new(Some(receiver)) });
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let script = Arc::clone(&script);
                tokio::spawn(async move {
                    let service = service_fn(move |request| answer(Arc::clone(&script), request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self { address, notes, pieces: Some(pieces), task }
    }
}

/// `/v1/chat/completions` echoes; `/v1/completions` answers piece by piece; `/tokenize` fails; `/v1/embeddings` and `/pause` never answer.
async fn answer(script: Arc<Script>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    let body = body.collect().await.map(|whole| whole.to_bytes()).unwrap_or_default();
    match path.as_str() {
        "/v1/chat/completions" => {
            let headers: serde_json::Map<_, _> = head
                .headers
                .iter()
                .map(|(name, value)| (name.to_string(), value.to_str().unwrap_or("?").into()))
                .collect();
            let echo = json!({"headers": headers, "query": head.uri.query(), "body": String::from_utf8_lossy(&body)});
            let response = Response::builder().header("x-fovea-secret", "1").header("x-engine", "yes");
            Ok(response.body(Full::from(echo.to_string()).boxed_unsync()).unwrap())
        }
        "/v1/completions" => {
            let leaving = Leaving(script.notes.clone());
            let mut pieces = script.pieces.lock().await.take().unwrap();
            script.notes.send(Note::Began).unwrap();
            let frames = futures_util::stream::poll_fn(move |cx| {
                let _held = &leaving;
                pieces.poll_recv(cx).map(|piece| piece.map(|piece| Ok(http_body::Frame::data(Bytes::from(piece)))))
            });
            Ok(Response::new(StreamBody::new(frames).boxed_unsync()))
        }
        "/v1/embeddings" | "/pause" => {
            let _leaving = Leaving(script.notes.clone());
            script.notes.send(Note::Began).unwrap();
            std::future::pending().await
        }
        "/tokenize" => {
            let error = r#"{"error":{"message":"no","type":"BadRequestError","param":null,"code":422}}"#;
            Ok(Response::builder().status(422).body(Full::from(error).boxed_unsync()).unwrap())
        }
        _ => Ok(Response::builder().status(404).body(Full::from("nothing here").boxed_unsync()).unwrap()),
    }
}
