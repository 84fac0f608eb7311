//! The gates at which a read waits, and the record of how long it waited at each one.
//!
//! ```text
//! Waits of the server's metrics and of the job          every wait is added here, too
//!    ▲
//! Waits of a request ◀── Waits of a read ◀── pass_gate(Gate::OriginPace, …)
//! ```
//! Code that waits names its gate and knows nothing of requests. The waits of the task in which it runs get
//! the time. A task that works for a request is started with [`carried`].

mod gate;
mod request_id;
mod waits;

pub use gate::Gate;
pub use request_id::RequestId;
pub use waits::{
    InRequest, InWaits, MakeSpan, PassGate, RecordWait, Waits, carried, in_request, in_waits, pass_gate,
};
