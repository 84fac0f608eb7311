//! Accepts connections, and never stops: who is not served goes to the probe lane.

use super::{
    App,
    local_stream::{LocalStream, refuse_descriptors},
};
use crate::tenancy::{
    auth::Peer,
    connections::{Connection, Source},
};
use std::{io, sync::Arc, time::Duration};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

/// How long the server waits after a failed accept, for example for lack of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// An accepted connection, before the handshake of TLS.
pub(super) type Wire = Either<TcpStream, LocalStream>;
/// What requests are read from. Boxed, because TLS has a large state and most waits have none.
pub(super) type PeerStream = Either<Wire, Box<TlsStream<TcpStream>>>;

impl App {
    pub(super) async fn accept_tcp(self: Arc<Self>, listener: TcpListener) {
        let next = || async {
            let (stream, address) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Ok((stream, Peer::Tcp, Source::of(address.ip())))
        };
        self.accept(next, |stream, _| Either::Left(stream)).await;
    }

    pub(super) async fn accept_unix(self: Arc<Self>, listener: UnixListener) {
        let kernel_refuses = refuse_descriptors(&listener);
        let next = || async {
            let (stream, _) = listener.accept().await?;
            let (uid, gid) = stream.peer_cred().map(|peer| (peer.uid(), peer.gid()))?;
            Ok((stream, Peer::Unix { uid, gid }, Source::User(uid)))
        };
        let wire = |stream, of: &_| Either::Right(LocalStream::new(stream, of, kernel_refuses));
        self.accept(next, wire).await;
    }

    async fn accept<F, S>(self: &Arc<Self>, next: impl Fn() -> F, wire: impl Fn(S, &Arc<Connection>) -> Wire)
    where
        F: Future<Output = io::Result<(S, Peer, Source)>>,
    {
        loop {
            let accepted = tokio::select! {
                () = self.drain.cancelled() => return,
                accepted = next() => accepted,
            };
            match accepted {
                Ok((stream, peer, source)) => {
                    let (connection, refused) = self.server.connections.admit(source);
                    let (app, connection) = (Arc::clone(self), Arc::new(connection));
                    let wire = wire(stream, &connection);
                    match refused {
                        None => self.connections.spawn(app.serve(wire, peer, connection)),
                        Some(why) => self.connections.spawn(app.answer_probe(wire, connection, why)),
                    };
                }
                // The peer left while it was being accepted.
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) => {
                    tracing::warn!(error = %e, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }
}
