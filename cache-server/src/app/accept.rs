//! Accepts connections, and never stops: who is not served goes to the probe lane.

use super::App;
use crate::tenancy::{auth::Peer, connections::Source};
use std::{io, sync::Arc, time::Duration};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

/// How long the server waits after a failed accept, for example for lack of descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// An accepted connection, before the handshake of TLS.
pub(super) type Wire = Either<TcpStream, UnixStream>;
/// What requests are read from. Boxed, because TLS has a large state and most waits have none.
pub(super) type PeerStream = Either<Wire, Box<TlsStream<TcpStream>>>;

impl App {
    pub(super) async fn accept_tcp(self: Arc<Self>, listener: TcpListener) {
        self.accept(|| async {
            let (stream, address) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Ok((Either::Left(stream), Peer::Tcp, Source::of(address.ip())))
        })
        .await;
    }

    pub(super) async fn accept_unix(self: Arc<Self>, listener: UnixListener) {
        self.accept(|| async {
            let (stream, _) = listener.accept().await?;
            let (uid, gid) = stream.peer_cred().map(|peer| (peer.uid(), peer.gid()))?;
            Ok((Either::Right(stream), Peer::Unix { uid, gid }, Source::User(uid)))
        })
        .await;
    }

    async fn accept<F>(self: &Arc<Self>, next: impl Fn() -> F)
    where
        F: Future<Output = io::Result<(Wire, Peer, Source)>>,
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
                    match refused {
                        None => self.connections.spawn(app.serve(stream, peer, connection)),
                        Some(why) => self.connections.spawn(app.answer_probe(stream, connection, why)),
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
