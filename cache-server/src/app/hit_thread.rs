//! The thread of a hit connection (`http::hits`).
//!
//! The task of the connection waits beside it, and shuts the socket down when the connection is to end. The
//! thread notices that at its next read or write.

use super::{
    App,
    local_stream::{LocalStream, close},
};
use crate::{
    http::{HIT_STACK_BYTES, HitSession},
    tenancy::connections::Connection,
};
use std::{net::Shutdown, sync::Arc, time::Duration};
use tokio::{runtime::Handle, sync::oneshot};

/// How long the task waits for its thread after it shut the socket down. Only a dead disk holds a thread.
const END_WAIT: Duration = Duration::from_millis(500);

impl App {
    /// Serves a hit connection until it ends, or the server closes or drains it.
    pub(super) async fn serve_hits(
        &self,
        stream: LocalStream,
        session: Arc<HitSession>,
        connection: &Arc<Connection>,
    ) {
        let sockets = stream.into_socket().and_then(|socket| Ok((socket.try_clone()?, socket)));
        let (stop, socket) = match sockets {
            Ok(sockets) => sockets,
            Err(error) => {
                tracing::warn!(%error, "a hit connection has no socket for its thread");
                return;
            }
        };
        let (runtime, connection) = (Handle::current(), Arc::clone(connection));
        let (ended_sender, mut ended) = oneshot::channel();
        let of_thread = Arc::clone(&connection);
        let thread = std::thread::Builder::new().name("fletch-hits".to_owned()).stack_size(HIT_STACK_BYTES);
        let started = thread.spawn(move || {
            // Timers of the functions that it shares with other requests need a runtime.
            let _entered = runtime.enter();
            let outcome = session.serve(&socket, &of_thread);
            drop((socket, of_thread));
            // Nobody listens if the task ended first.
            drop(ended_sender.send(outcome));
        });
        if let Err(error) = started {
            tracing::warn!(%error, "the system starts no thread for a hit connection");
            return;
        }
        let outcome = tokio::select! {
            outcome = &mut ended => outcome,
            () = connection.closed() => end(&stop, ended).await,
            () = self.drain.cancelled() => end(&stop, ended).await,
        };
        close(stop, Arc::clone(&connection));
        if let Ok(Err(error)) = outcome {
            tracing::debug!(%error, source = %connection.source(), "a hit connection ended with an error");
        }
    }
}

type Outcome = Result<std::io::Result<()>, oneshot::error::RecvError>;

/// Shuts the socket down and waits for the thread, but not for long.
async fn end(
    socket: &std::os::unix::net::UnixStream,
    ended: oneshot::Receiver<std::io::Result<()>>,
) -> Outcome {
    if let Err(error) = socket.shutdown(Shutdown::Both) {
        tracing::debug!(%error, "the client of a hit connection had left");
    }
    match tokio::time::timeout(END_WAIT, ended).await {
        Ok(outcome) => outcome,
        Err(_) => {
            tracing::warn!("the thread of a hit connection does not end: a disk holds it");
            Ok(Ok(()))
        }
    }
}
