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
    /// `doctor` found what keeps the pod from being ready or from serving.
    DoctorErrors,
    /// Envoy ended by itself, with this code or, for signal n, 128 + n.
    Envoy(u8),
}

impl ExitCode {
    pub fn number(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::CommandFailed => 255,
            Self::CaptureFailed | Self::DoctorWarnings => 1,
            Self::DoctorErrors => 2,
            Self::NotCaptured => 126,
            Self::CaptureDiffers => 3,
            Self::DoctorRefused => 4,
            Self::Envoy(code) => code,
        }
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(code.number())
    }
}
