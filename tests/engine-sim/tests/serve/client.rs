//! Starting engines and talking to them.

use bytes::Bytes;
use engine_sim::{Sim, SimConfig};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::path::Path;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../vectors/vllm");

/// The tiny model, without waiting, all ports chosen by the system.
pub fn config() -> SimConfig {
    let lora = ("lora1".to_owned(), "./tiny-qwen3-vl-lora".to_owned());
    SimConfig {
        model_dir: Path::new(VECTORS).join("tiny-qwen3-vl"),
        speed: 0.0,
        loras: vec![lora],
        ..SimConfig::default()
    }
}

pub async fn start() -> Sim {
    Sim::start(config()).await.unwrap()
}

pub async fn send(sim: &Sim, method: &str, path: &str, body: String) -> Result<Response<Incoming>, String> {
    send_with(sim, method, path, &[], body).await
}

pub async fn send_with(
    sim: &Sim,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: String,
) -> Result<Response<Incoming>, String> {
    let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http::<Full<Bytes>>();
    let mut request = Request::builder().method(method).uri(format!("http://{}{path}", sim.http));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(Bytes::from(body))).unwrap();
    client.request(request).await.map_err(|error| error.to_string())
}

pub async fn text(response: Response<Incoming>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

pub async fn get(sim: &Sim, path: &str) -> String {
    text(send(sim, "GET", path, String::new()).await.unwrap()).await
}

/// Status and JSON body.
pub async fn post(sim: &Sim, path: &str, body: &Value) -> (u16, Value) {
    post_with(sim, path, &[], body).await
}

pub async fn post_with(sim: &Sim, path: &str, headers: &[(&str, &str)], body: &Value) -> (u16, Value) {
    let response = send_with(sim, "POST", path, headers, body.to_string()).await.unwrap();
    let status = response.status().as_u16();
    (status, serde_json::from_str(&text(response).await).unwrap_or(Value::Null))
}

pub async fn chat(sim: &Sim, body: &Value) -> Value {
    let (status, answer) = post(sim, "/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

/// A prompt of token ids, all different from those of another `salt`.
pub fn completion(salt: usize, tokens: usize, output: usize) -> Value {
    let ids: Vec<_> = (0..tokens).map(|i| (i * 7 + salt * 31) % 500).collect();
    json!({"model": "tiny-vl", "prompt": ids, "max_tokens": output})
}

pub fn image_request(file: &str, question: &str) -> Value {
    let bytes = std::fs::read(Path::new(VECTORS).join("images").join(file)).unwrap();
    let url = format!("data:image/png;base64,{}", base64_simd::STANDARD.encode_to_string(bytes));
    let content = json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]);
    json!({"model": "tiny-vl", "messages": [{"role": "user", "content": content}], "max_tokens": 4})
}

/// A subscriber whose subscription the engine has seen.
pub async fn subscribe(sim: &Sim) -> SubSocket {
    subscribe_to(sim, 0).await
}

/// The same to one rank.
pub async fn subscribe_to(sim: &Sim, rank: usize) -> SubSocket {
    let before = sim.state().ranks[rank].subscriptions;
    let mut socket = SubSocket::new();
    socket.connect(&sim.sources[rank].events).await.unwrap();
    socket.subscribe("").await.unwrap();
    sim.wait_for(|state| state.ranks[rank].subscriptions > before).await;
    socket
}

/// The next batch: sequence number and events.
pub async fn next_batch(socket: &mut SubSocket) -> (u64, Vec<Value>) {
    let (seq, batch) = next_payload(socket).await;
    (seq, batch[1].as_array().unwrap().clone())
}

/// The next batch: sequence number and `[ts, events, rank]`.
pub async fn next_payload(socket: &mut SubSocket) -> (u64, Value) {
    let frames = socket.recv().await.unwrap().into_vec();
    assert_eq!(frames.len(), 3);
    assert!(frames[0].is_empty() || frames[0].starts_with(b"kv@127.0.0.1:"));
    (u64::from_be_bytes(frames[1].as_ref().try_into().unwrap()), decode(&mut &frames[2][..]))
}

fn batch(seq: &[u8], payload: &[u8]) -> (u64, Vec<Value>) {
    let batch = decode(&mut &payload[..]);
    (u64::from_be_bytes(seq.try_into().unwrap()), batch[1].as_array().unwrap().clone())
}

/// Replays from `start`; all frames are checked up to the end marker.
pub async fn replay(sim: &Sim, start: u64) -> Vec<(u64, Vec<Value>)> {
    replay_of(sim, start, 4).await
}

/// The same with replies of `length` frames.
pub async fn replay_of(sim: &Sim, start: u64, length: usize) -> Vec<(u64, Vec<Value>)> {
    let mut socket = DealerSocket::new();
    socket.connect(&sim.replay).await.unwrap();
    let frames = vec![Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())];
    socket.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    let mut out = Vec::new();
    loop {
        let frames = socket.recv().await.unwrap().into_vec();
        assert_eq!((frames.len(), frames[0].len()), (length, 0));
        let [before @ .., seq, payload] = &frames[..] else { panic!("{} frames", frames.len()) };
        if seq.as_ref() == [0xff; 8] {
            assert!(before.iter().all(Bytes::is_empty) && payload.is_empty());
            return out;
        }
        out.push(batch(seq, payload));
    }
}

/// Msgpack as JSON; binaries as hex.
fn decode<'a>(bytes: &mut &'a [u8]) -> Value {
    use rmp::Marker;
    use rmp::decode as read;
    let marker = Marker::from_u8(bytes[0]);
    match marker {
        Marker::Null => {
            read::read_nil(bytes).unwrap();
            Value::Null
        }
        Marker::F64 => read::read_f64(bytes).unwrap().into(),
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => {
            let length = read::read_array_len(bytes).unwrap();
            (0..length).map(|_| decode(bytes)).collect()
        }
        Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => {
            let length = read::read_map_len(bytes).unwrap();
            let pair = |_| (decode(bytes).as_str().unwrap().to_owned(), decode(bytes));
            Value::Object((0..length).map(pair).collect())
        }
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
            let whole: &'a [u8] = bytes;
            let (text, rest) = read::read_str_from_slice(whole).unwrap();
            let text = Value::from(text);
            *bytes = rest;
            text
        }
        Marker::Bin8 => {
            let length = usize::try_from(read::read_bin_len(bytes).unwrap()).unwrap();
            let (data, rest) = bytes.split_at(length);
            *bytes = rest;
            data.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
        }
        Marker::FixNeg(_) | Marker::I8 | Marker::I16 | Marker::I32 | Marker::I64 => {
            read::read_int::<i64, _>(bytes).unwrap().into()
        }
        _ => read::read_int::<u64, _>(bytes).unwrap().into(),
    }
}
