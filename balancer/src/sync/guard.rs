//! Who may open a stream: TLS, and the shared key, before the first message is looked at.
//!
//! **Invariant:** with a key, or with `client_auth: required`, no byte of a peer that has not proven itself reaches the stream's decoder. Everything
//! here is bounded: one time limit for all of it, frames of 64 bytes, and so many peers at a time.

use std::sync::Arc;
use std::time::Duration;

use fovea_gossip::auth::{self, Acceptor, Cause, FIRST_BYTES, Message, Nonce, SharedKey};
use fovea_service::tls::handshake::HandshakeError;
use fovea_service::tls::random;
use fovea_service::tls::server::ServerTls;
use fovea_service::tls::socket::Socket;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::secure::SidecarTls;

/// TLS and key exchange together.
const ENTER_TIME_MAX: Duration = Duration::from_secs(5);
/// What a refused peer has on its way is taken, so that it can read why: a connection closed before loses the answer.
const REFUSED_BYTES_MAX: u64 = 64 << 10;
const REFUSED_TIME_MAX: Duration = Duration::from_secs(1);

/// ALPN name of the block stream.
pub const PROTOCOLS: &[&[u8]] = &[b"fovea/1"];

/// What sidecars must prove, and how those that advertise https are reached.
#[derive(Clone, Default)]
pub struct Guard {
    pub tls: Option<Arc<ServerTls>>,
    pub key: Option<SharedKey>,
    pub sidecars: Option<Arc<SidecarTls>>,
}

/// What a sidecar proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Proven {
    Nothing,
    Key,
    Certificate,
}

/// A peer that may speak.
pub struct Entered {
    pub socket: Socket,
    /// Bytes of its first message that were looked at.
    pub begun: Vec<u8>,
    pub proven: Proven,
}

#[derive(Debug, thiserror::Error)]
pub enum NotEntered {
    #[error("nothing was proven within {} s", ENTER_TIME_MAX.as_secs())]
    TimedOut,
    #[error(transparent)]
    Tls(#[from] HandshakeError),
    #[error("the sidecar has no shared key: set its trust.shared_key_file to ours, or give it a certificate")]
    KeyMissing,
    #[error("the sidecar has a shared key and this balancer has none: set trust.shared_key_file")]
    NoKeyHere,
    #[error("the sidecar has another shared key, or none: give both programs the same trust.shared_key_file")]
    WrongKey,
    #[error("the connection broke")]
    Broken(#[from] std::io::Error),
    #[error("what came is no part of the key exchange")]
    Malformed,
}

impl From<Cause> for NotEntered {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::KeyMissing => Self::KeyMissing,
            Cause::NoKeyHere => Self::NoKeyHere,
            Cause::WrongKey => Self::WrongKey,
        }
    }
}

impl Guard {
    /// Lets a peer in, or tells it why not.
    ///
    /// # Errors
    /// When it does not prove what it must in time.
    pub async fn enter(&self, stream: TcpStream) -> Result<Entered, NotEntered> {
        stream.set_nodelay(true)?;
        let entered = timeout(ENTER_TIME_MAX, self.check(stream)).await.map_err(|_| NotEntered::TimedOut)??;
        match entered {
            Ok(entered) => Ok(entered),
            Err((socket, cause)) => {
                refuse(socket, cause).await;
                Err(cause.into())
            }
        }
    }

    /// The outer error is the connection's, the inner one is to be told to the peer.
    async fn check(&self, stream: TcpStream) -> Result<Result<Entered, (Socket, Cause)>, NotEntered> {
        let (mut socket, verified): (Socket, bool) = match &self.tls {
            Some(tls) => (Box::new(tls.accept(stream).await?), tls.verifies_peers()),
            None => (Box::new(stream), false),
        };
        let mut proven = if verified { Proven::Certificate } else { Proven::Nothing };
        let begun = first_bytes(&mut socket).await?;
        let knocks = <[u8; FIRST_BYTES]>::try_from(begun.as_slice()).is_ok_and(auth::is_knock);
        match (&self.key, knocks) {
            (Some(key), true) => {
                let knock = knocked(&mut socket, &begun).await?;
                if let Err(cause) = exchange(&mut socket, key.clone(), knock).await? {
                    return Ok(Err((socket, cause)));
                }
                proven = if verified { proven } else { Proven::Key };
                return Ok(Ok(Entered { socket, begun: Vec::new(), proven }));
            }
            (None, true) => return Ok(Err((socket, Cause::NoKeyHere))),
            (Some(_), false) if !verified => return Ok(Err((socket, Cause::KeyMissing))),
            _ => {}
        }
        Ok(Ok(Entered { socket, begun, proven }))
    }
}

/// As many bytes as tell what kind of frame comes; fewer when the peer closes.
async fn first_bytes(socket: &mut Socket) -> Result<Vec<u8>, std::io::Error> {
    let mut begun = Vec::with_capacity(FIRST_BYTES);
    let mut limited = socket.take(FIRST_BYTES as u64);
    while begun.len() < FIRST_BYTES && limited.read_buf(&mut begun).await? > 0 {}
    Ok(begun)
}

/// The rest of a knock.
async fn knocked(socket: &mut Socket, begun: &[u8]) -> Result<Nonce, NotEntered> {
    let Some((length, content)) = begun.split_first_chunk() else { return Err(NotEntered::Malformed) };
    let length = auth::frame_length(*length).map_err(|_| NotEntered::Malformed)?;
    let mut frame = content.to_vec();
    frame.resize(length.max(content.len()), 0);
    socket.read_exact(&mut frame[content.len()..]).await?;
    match auth::decode(&frame) {
        Ok(Message::Knock(nonce)) => Ok(nonce),
        _ => Err(NotEntered::Malformed),
    }
}

async fn exchange(socket: &mut Socket, key: SharedKey, knock: Nonce) -> Result<Result<(), Cause>, NotEntered> {
    let (acceptor, challenge) = Acceptor::new(key, random()?, knock);
    say(socket, &challenge).await?;
    let mut length = [0; 4];
    socket.read_exact(&mut length).await?;
    let mut frame = vec![0; auth::frame_length(length).map_err(|_| NotEntered::Malformed)?];
    socket.read_exact(&mut frame).await?;
    match acceptor.on(auth::decode(&frame).map_err(|_| NotEntered::Malformed)?) {
        Ok(granted) => Ok(Ok(say(socket, &granted).await?)),
        Err(cause) => Ok(Err(cause)),
    }
}

async fn say(socket: &mut Socket, message: &Message) -> Result<(), std::io::Error> {
    socket.write_all(&auth::encode(message)).await?;
    socket.flush().await
}

async fn refuse(mut socket: Socket, cause: Cause) {
    let told = async {
        say(&mut socket, &Message::Refused(cause)).await?;
        socket.shutdown().await?;
        tokio::io::copy(&mut socket.take(REFUSED_BYTES_MAX), &mut tokio::io::sink()).await
    };
    if let Ok(Err(error)) = timeout(REFUSED_TIME_MAX, told).await {
        tracing::debug!(%error, "a refused sidecar could not be told why");
    }
}
