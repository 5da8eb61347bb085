//! The exit codes of the program.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitCode {
    Success,
    /// Any error of a command, as in pilot-agent.
    CommandFailed,
    /// An error of `istio-iptables` after its command line was read, as in pilot-agent.
    CaptureFailed,
    /// `istio-iptables --run-validation` found that traffic is not captured, as in pilot-agent. The CNI
    /// plugin repairs pods whose init container exits with it.
    NotCaptured,
    /// `istio-iptables --verify` found that traffic may not go where it should.
    CaptureDiffers,
    /// The agent does not let this user run `doctor`.
    DoctorRefused,
    /// `doctor` found settings or states that may not work for long.
    DoctorWarnings,
    /// `doctor` found a problem that keeps the pod from being ready or from serving.
    DoctorErrors,
    /// Envoy ended by itself, with this code or, for signal n, 128 + n.
    Envoy(u8),
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(match code {
            ExitCode::Success => 0,
            ExitCode::CommandFailed => 255,
            ExitCode::CaptureFailed | ExitCode::DoctorWarnings => 1,
            ExitCode::DoctorErrors => 2,
            ExitCode::NotCaptured => 126,
            ExitCode::CaptureDiffers => 3,
            ExitCode::DoctorRefused => 4,
            ExitCode::Envoy(code) => code,
        })
    }
}
