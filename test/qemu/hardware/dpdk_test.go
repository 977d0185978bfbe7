// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// TestDPDK checks that a program of DPDK forwards frames by the VF of a claim with vfio-pci, and that
// the VF is as before afterwards. A peer on another VF sends frames, and gets them back with their
// addresses swapped. The program is the one of examples/dpdk.yaml, with hugepages.
func TestDPDK(t *testing.T) {
	card.InGuest(t, "igb")
	hugepages(t, "64")
	unsafeInterrupts(t)
	pf := card.PFs(t)[0]
	c := newClaims(t, t.TempDir(), v1alpha1.DevicePoolSpec{}, func(string) {})
	carrier(t, pf)

	vf := card.VF(t, pf, 0)
	device := deviceOf(t, pf, 0)
	before, err := c.engine.Snapshot(t.Context(), device)
	must.Succeed(t, err)
	peer := attached(t, c.engine, pf, 1, 2, nil)

	object := claimOf(pf, vf, `"driver": "vfio-pci", "network": "lab"`)
	_, err = c.prepare(object)
	must.Succeed(t, err)
	observed, err := c.attach(object, vf, netns.New(t))
	must.Succeed(t, err)

	forwarder := startForwarder(t, string(vf))
	far := observed.MAC.HardwareAddr()
	if !swapped(t, peer, far, time.Minute) {
		t.Errorf("no frame came back")
	}
	forwarder.stop(t)

	must.Succeed(t, c.unprepare(t.Context(), object))
	wantRestored(t, c, netdev.Device{Name: card.Netdev(vf), PF: device.PF}, before)
}

// hugepages reserves so many pages of 2 MiB until the test ends.
func hugepages(t *testing.T, count string) {
	t.Helper()
	const path = "/proc/sys/vm/nr_hugepages"
	must.Succeed(t, os.WriteFile(path, []byte(count), 0))
	t.Cleanup(func() { must.Succeed(t, os.WriteFile(path, []byte("0"), 0)) })
	got, err := os.ReadFile(path)
	must.Succeed(t, err)
	if have := string(bytes.TrimSpace(got)); have != count {
		t.Fatalf("the kernel has %s hugepages free, want %s", have, count)
	}
}

// unsafeInterrupts lets VFIO use an IOMMU that does not remap interrupts, until the test ends. The
// guest's IOMMU is such a one.
func unsafeInterrupts(t *testing.T) {
	t.Helper()
	const path = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"
	must.Succeed(t, os.WriteFile(path, []byte("1"), 0))
	t.Cleanup(func() { must.Succeed(t, os.WriteFile(path, []byte("0"), 0)) })
}

// forwarder is a running dpdk-testpmd.
type forwarder struct {
	command *exec.Cmd
	output  *bytes.Buffer
}

// startForwarder starts dpdk-testpmd with the Function at a PCI address, until the test ends. The
// program swaps the addresses of each frame, because a frame that came back as it went would again be
// for the Function itself.
func startForwarder(t *testing.T, address string) forwarder {
	t.Helper()
	f := forwarder{output: &bytes.Buffer{}}
	f.command = exec.Command("/usr/bin/dpdk-testpmd", "--lcores=0@0,1@0", "--in-memory", "-m", "64",
		"-d", "librte_net_e1000.so.25", "-d", "librte_mempool_ring.so.25", "-a", address, "--",
		"--forward-mode=macswap", "--auto-start", "--total-num-mbufs=4096", "--no-lsc-interrupt",
		"--stats-period=5")
	f.command.Stdout, f.command.Stderr = f.output, f.output
	must.Succeed(t, f.command.Start())
	t.Cleanup(func() {
		_ = f.command.Process.Kill()
		_ = f.command.Wait()
		if t.Failed() {
			t.Log(f.output.String())
		}
	})

	return f
}

// stop ends the program as a container runtime does.
func (f forwarder) stop(t *testing.T) {
	t.Helper()
	must.Succeed(t, f.command.Process.Signal(unix.SIGTERM))
	if err := f.command.Wait(); err != nil {
		t.Logf("dpdk-testpmd: %v", err)
	}
}

// swapped reports whether a frame that the peer sends to an address comes back from this address
// within the time.
func swapped(t *testing.T, peer pod, far net.HardwareAddr, within time.Duration) (came bool) {
	t.Helper()
	const kind = 0x88b5 // a local experiment, IEEE 802
	link, err := peer.Handle().LinkByName("net1")
	must.Succeed(t, err)
	frame := append(append(append([]byte{}, far...), peer.mac...), kind>>8, kind&0xff)
	frame = append(frame, make([]byte, 60-len(frame))...)
	back := append(append([]byte{}, peer.mac...), far...)

	must.Succeed(t, peer.Do(func() error {
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(socket)

		to := &unix.SockaddrLinklayer{
			Ifindex: link.Attrs().Index, Protocol: kind>>8 | kind&0xff<<8,
		}
		wait := unix.NsecToTimeval(int64(100 * time.Millisecond))
		err = unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)
		if err == nil {
			err = unix.Bind(socket, to)
		}
		if err != nil {
			return err
		}

		buffer := make([]byte, 2048)
		for end := time.Now().Add(within); time.Now().Before(end) && !came; {
			if err := unix.Sendto(socket, frame, 0, to); err != nil {
				return err
			}
			n, _, _ := unix.Recvfrom(socket, buffer, 0)
			came = n >= len(back) && bytes.Equal(buffer[:len(back)], back)
		}
		return nil
	}))

	return came
}
