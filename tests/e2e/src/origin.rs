//! A web server for pictures, on loopback.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

type Files = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// Serves what [`put`](Self::put) gave it, by path without query; closes each connection after one answer.
pub struct Origin {
    pub address: SocketAddr,
    files: Files,
    task: tokio::task::JoinHandle<()>,
}

impl Origin {
    pub async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, files) = (listener.local_addr()?, Files::default());
        let served = Arc::clone(&files);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&served)));
            }
        });
        Ok(Self { address, files, task })
    }

    /// From now on `path` holds `bytes`.
    pub fn put(&self, path: &str, bytes: Vec<u8>) {
        self.files.lock().expect("no holder panics").insert(path.to_owned(), bytes);
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(mut stream: TcpStream, files: Files) -> std::io::Result<()> {
    let (read, mut write) = stream.split();
    let mut lines = BufReader::new(read).lines();
    let first = lines.next_line().await?.unwrap_or_default();
    while lines.next_line().await?.is_some_and(|line| !line.is_empty()) {}
    let path = first.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap_or_default();
    let file = files.lock().expect("no holder panics").get(path).cloned();
    let (status, body) = file.map_or(("404 Not Found", Vec::new()), |bytes| ("200 OK", bytes));
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    write.write_all(head.as_bytes()).await?;
    write.write_all(&body).await?;
    write.shutdown().await
}
