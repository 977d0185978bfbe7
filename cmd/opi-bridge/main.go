// SPDX-License-Identifier: Apache-2.0

// Command opi-bridge is an OPI agent for xPUs that run plain Linux. See
// docs/reference/opi-bridge.md.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/logging"
	"github.com/opiproject/xpu-device-plugin/pkg/otlp/metrics"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// options are the values of the flags.
type options struct {
	config         service.Config
	listen         string
	metricsListen  string
	metricsTLS     bool
	collector      string
	profilesListen string
	hostPFFile     string
	remotesFile    string
	tls            access.CredentialFiles
	insecure       bool
	logs           logging.Options
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := command(os.Stderr).ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "opi-bridge:", err)
		os.Exit(1)
	}
}

func command(logs io.Writer) *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "opi-bridge",
		Short: "An OPI agent for xPUs that run plain Linux",
		Long: `opi-bridge serves the OPI LogicalBridge, BridgePort, Vrf, Svi and Inventory services on an xPU that runs plain Linux.
A logical bridge is a VLAN of a Linux bridge, or a bridge of its own where the kernel cannot filter VLANs, with a
VXLAN port on the uplink if it has a VNI; a bridge port is the netdev whose name or alternative name is the
port's id, or else the representor of the function whose PCI address the id tells. An SVI is the gateway of a logical
bridge in a VRF. The data plane keeps running when the agent stops.`,
		Example: `  # An agent for clients on this machine, with networks that stay on this xPU.
  opi-bridge --state ./state.db

  # An agent for a controller elsewhere: mTLS, networks that reach other xPUs over p0.
  opi-bridge --listen 0.0.0.0:50151 --uplink p0 \
    --tls-cert /etc/opi-bridge/tls.crt --tls-key /etc/opi-bridge/tls.key --tls-client-ca /etc/opi-bridge/ca.crt

  # The same, with metrics for an OpenTelemetry collector on the xPU.
  opi-bridge --uplink p0 --metrics-endpoint http://127.0.0.1:4317

  # The same where the network between the xPUs has no multicast.
  opi-bridge --uplink p0 --remotes /etc/opi-bridge/remotes.yaml

  # On a DPU: the host's PFs, by their PCI addresses there, by phys_port_name of their representors on the DPU, and by
  # "VF offset: 2, stride: 1" in the host's lspci -vv.
  opi-bridge --host-pf 0000:3b:00.0=c1pf0,offset=2,stride=1 --host-pf 0000:3b:00.1=c1pf1,offset=17,stride=1

  # On a machine whose own pods get the functions of its card, in eswitch mode switchdev.
  opi-bridge --host-pf 0000:01:00.0=own

  # On a DPU whose devlink does not tell the serial number of the card, so that xpu-controller cannot see whose it is.
  opi-bridge --host-pf c1pf0,serial=MT2334XZ0LTK --host-pf c1pf1,serial=MT2334XZ0LTK`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, Version: version.String(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := o.logs.Logger(logs)
			if err != nil {
				return err
			}
			return run(cmd.Context(), o, log)
		},
	}

	f := cmd.Flags()
	o.addServerFlags(f)
	o.addAgentFlags(f)
	o.logs.AddFlags(f)
	cmd.MarkFlagsRequiredTogether("tls-cert", "tls-key", "tls-client-ca")
	cmd.MarkFlagsMutuallyExclusive("tls-cert", "insecure")
	cmd.MarkFlagsMutuallyExclusive("metrics-tls", "insecure")

	return cmd
}

// addServerFlags adds the flags that say what is served on which address to whom.
func (o *options) addServerFlags(f *pflag.FlagSet) {
	f.StringVar(&o.listen, "listen", "127.0.0.1:50151",
		"`address` to serve gRPC on, host:port; others than loopback need TLS or --insecure")
	f.StringVar(&o.tls.Cert, "tls-cert", "", "PEM `file` with the agent's certificate chain; "+
		"read again when it changes, as the next two are")
	f.StringVar(&o.tls.Key, "tls-key", "", "PEM `file` with the key of --tls-cert")
	f.StringVar(&o.tls.ClientCA, "tls-client-ca", "",
		"PEM `file` with the authorities of the clients' certificates")

	f.StringVar(&o.tls.Authorization, "authorization", "",
		"YAML `file` with rules of who may see and change which objects, in which segments "+
			"and how many, by the subject of the client's certificate; "+
			"read again when it changes; empty: whoever has a certificate may do anything")

	f.BoolVar(&o.insecure, "insecure", false, "serve without TLS on any address")
	f.StringVar(&o.metricsListen, "metrics-listen",
		"", "`address` to serve Prometheus metrics on at /metrics, host:port; empty: none")

	f.BoolVar(&o.metricsTLS, "metrics-tls", false,
		"serve metrics by TLS with --tls-cert, to clients that have a certificate of "+
			"--tls-client-ca and, with --authorization, "+
			"a rule for all networks and ports")

	f.StringVar(&o.collector, "metrics-endpoint", "", metrics.EndpointUsage)

	f.StringVar(&o.profilesListen, "pprof-listen", "",
		"loopback `address` to serve Go profiles on at /debug/pprof, such as 127.0.0.1:6060; "+
			"empty: none")
}

// addAgentFlags adds the flags of the state file and the data plane.
func (o *options) addAgentFlags(f *pflag.FlagSet) {
	config := &o.config.Plane
	f.StringVar(&o.config.State, "state", "/var/lib/opi-bridge/state.db",
		"`file` that keeps what clients asked for; made if missing")
	f.BoolVar(&o.config.NewState, "new-state", false,
		"go on with a --state that is new although an agent has made networks and ports before: "+
			"they are removed; for one start")

	f.Func("uplink", "a `netdev` that VXLAN is sent from, a bond or a VLAN if need be; with "+
		"several each says for which VNIs, as "+
		"p0=1-9999, but one that has all others; without any, logical bridges with a VNI are "+
		"refused", func(s string) error {
		uplink, err := plane.ParseUplink(s)
		config.Uplinks = append(config.Uplinks, uplink)
		return err
	})

	f.StringVar((*string)(&config.Underlay), "underlay", string(plane.UnderlayAuto),
		"`version` of IP that VXLAN is sent over, the same on all xPUs: ipv4, ipv6, or auto, "+
			"which is ipv4 where the uplink has an IPv4 address")

	f.StringVar(&o.remotesFile, "remotes", "",
		"YAML `file` with the addresses of the other xPUs that VXLAN is sent to, so that it needs "+
			"no multicast; read again when it changes; empty: multicast groups")

	f.Func("host-pf", "a `pf` of the host, as address=name,offset=n,stride=n: how this xPU's "+
		"eswitch numbers its functions, "+
		"or name,mac=address,serial=number: which of the host's PFs it is, or address=own: a PF "+
		"of this machine, whose pods "+
		"get its functions; see the examples; once for each", func(s string) error {
		pf, err := representor.ParseHostPF(s)
		config.Representors.HostPFs = append(config.Representors.HostPFs, pf)
		return err
	})

	f.StringArrayVar(&config.Representors.Netdevs, "representor", nil,
		"`name`, or pattern of names such as sim-*, of netdevs that may be ports "+
			"although no eswitch says that they represent a function of the host; once for each")
	f.StringVar(&o.hostPFFile, "host-pf-file", "",
		"`file` that has in each line what --host-pf takes, so that all xPUs can have the same "+
			"flags; # begins a comment; none if missing")

	f.StringVar((*string)(&config.Mode), "data-plane", string(plane.ModeAuto),
		"`kind` of data plane: vlan-aware is one bridge for all networks, bridge-per-network one "+
			"for each; "+
			"auto is vlan-aware where the kernel can")

	f.StringVar(&config.Sysctl, "sysctl", "/proc/sys",
		"`directory` with the kernel's parameters: in a container, where nobody can write to "+
			"/proc/sys, one with a mount of the machine's /proc/sys/net")

	f.BoolVar(&o.config.SourceFilter, "source-filter", true,
		"drop what a port sends with another MAC address than its own; needs a kernel with "+
			"nftables for bridges")
}
