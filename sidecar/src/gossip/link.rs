//! From an address to a balancer that has proven itself: dial, TLS, shared key.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fovea_gossip::auth::{self, AuthError, Dialer, SharedKey};
use fovea_service::tls::client::ClientTls;
use fovea_service::tls::handshake::HandshakeError;
use fovea_service::tls::random;
use fovea_service::tls::socket::Socket;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// TLS and key exchange together. The dial has its own limit.
const PROVE_TIME_MAX: Duration = Duration::from_secs(5);

/// ALPN name of the block stream.
pub const PROTOCOLS: &[&[u8]] = &[b"fovea/1"];

/// What balancers must prove, and what they are shown.
#[derive(Clone, Default)]
pub struct Credentials {
    pub tls: Option<Arc<ClientTls>>,
    pub key: Option<SharedKey>,
}

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot connect within {limit:?}")]
    Dial {
        limit: Duration,
        #[source]
        source: Option<std::io::Error>,
    },
    #[error("no secure connection: {0}")]
    Tls(#[source] HandshakeError),
    #[error(transparent)]
    Key(#[from] AuthError),
    #[error("the connection broke while the shared key was proven; does the balancer have one?")]
    Broken(#[source] std::io::Error),
    #[error("the balancer proved nothing within {} s; does it have the shared key, or TLS?", PROVE_TIME_MAX.as_secs())]
    TooSlow,
}

/// A balancer to speak to, and our own end's address.
pub async fn open(
    credentials: &Credentials,
    address: SocketAddr,
    host: &str,
    limit: Duration,
) -> Result<(Socket, SocketAddr), LinkError> {
    let failed = |source| LinkError::Dial { limit, source };
    let dialled = timeout(limit, TcpStream::connect(address)).await;
    let stream = dialled.map_err(|_| failed(None))?.map_err(|source| failed(Some(source)))?;
    stream.set_nodelay(true).map_err(LinkError::Broken)?;
    let local = stream.local_addr().map_err(LinkError::Broken)?;
    let proven = timeout(PROVE_TIME_MAX, prove(credentials, host, stream)).await;
    Ok((proven.map_err(|_| LinkError::TooSlow)??, local))
}

async fn prove(credentials: &Credentials, host: &str, stream: TcpStream) -> Result<Socket, LinkError> {
    let mut socket: Socket = match &credentials.tls {
        Some(tls) => Box::new(tls.connect(host, stream).await.map_err(LinkError::Tls)?),
        None => Box::new(stream),
    };
    if let Some(key) = &credentials.key {
        let (mut dialer, knock) = Dialer::new(key.clone(), random().map_err(LinkError::Broken)?);
        let mut next = Some(knock);
        while let Some(message) = next {
            socket.write_all(&auth::encode(&message)).await.map_err(LinkError::Broken)?;
            socket.flush().await.map_err(LinkError::Broken)?;
            next = dialer.on(message_of(&mut socket).await?)?;
        }
    }
    Ok(socket)
}

async fn message_of(socket: &mut Socket) -> Result<auth::Message, LinkError> {
    let mut length = [0; 4];
    socket.read_exact(&mut length).await.map_err(LinkError::Broken)?;
    let mut frame = vec![0; auth::frame_length(length)?];
    socket.read_exact(&mut frame).await.map_err(LinkError::Broken)?;
    Ok(auth::decode(&frame)?)
}
