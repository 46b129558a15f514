//! A connection, secure or not, that its user need not tell apart.

use tokio::io::{AsyncRead, AsyncWrite};

/// Both directions of a connection. Written bytes may wait until a flush.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin + Send + Sync {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + Sync> Duplex for T {}

pub type Socket = Box<dyn Duplex>;
