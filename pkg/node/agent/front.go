// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
)

// front is what the kubelet sees of the DRA driver, from the start of the process on: its calls
// wait until the agent has the node.
type front struct {
	clientset  kubernetes.Interface
	gate       *dra.Gate
	helper     *kubeletplugin.Helper
	registered chan struct{} // closed when the kubelet knows the driver
	registers  sync.Once     // closes registered
	closing    sync.Once
}

// openFront makes the driver known to the kubelet.
func (a *agent) openFront(ctx context.Context) error {
	config, log := a.config, a.log.WithName("dra")
	// Protobuf keeps the opaque parameters in a claim's allocation byte by byte. JSON drops white
	// space, and the API server refuses a status in which they differ.
	verbatim := rest.CopyConfig(config.Kubernetes)
	verbatim.ContentType = runtime.ContentTypeProtobuf
	verbatim.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	clientset, err := kubernetes.NewForConfig(verbatim)
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}

	data := driverDir(config)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return fmt.Errorf("DRA driver: %w", err)
	}

	registrars := filepath.Join(config.KubeletDir, "plugins_registry")
	// Those of pods that were killed: the kubelet would try them again and again.
	err = errors.Join(peer.RemoveDead(filepath.Join(registrars, v1alpha1.GroupName+"*.sock")),
		peer.RemoveDead(filepath.Join(data, "*.sock")))
	if err != nil {
		log.Error(err, "A socket that nobody serves remains")
	}

	f := &front{clientset: clientset, gate: dra.NewGate(), registered: make(chan struct{})}
	// The context is not that of the process: calls that run when it ends may finish.
	f.helper, err = kubeletplugin.Start(logr.NewContext(context.WithoutCancel(ctx), log), f.gate,
		kubeletplugin.DriverName(v1alpha1.GroupName),
		kubeletplugin.NodeName(config.NodeName),
		kubeletplugin.KubeClient(clientset),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(registrars),
		// Two pods of the DaemonSet may be there at once while it is updated.
		kubeletplugin.RollingUpdate(types.UID(config.PodUID)),
		kubeletplugin.GRPCInterceptor(f.intercept),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{
			metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion,
		}),
		kubeletplugin.CDIDirectory(config.CDIDir),
		// A Prepare waits for its xPU and must not hold up others. Each Function has a lock.
		kubeletplugin.Serialize(false),
	)

	if err != nil {
		return fmt.Errorf("DRA driver: %w", err)
	}

	a.front = f
	return nil
}

// driverDir is the driver's own directory among those of the kubelet's plugins.
func driverDir(config Config) string {
	return filepath.Join(config.KubeletDir, "plugins", v1alpha1.GroupName)
}

// intercept hears when the kubelet has registered the driver.
func (f *front) intercept(
	ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	response, err := handle(ctx, request)
	if status, ok := request.(*registerapi.RegistrationStatus); ok && status.PluginRegistered {
		// two kubelets may tell it at once, as one replaces the other
		f.registers.Do(func() { close(f.registered) })
	}
	return response, err
}

// awaitRegistered returns when the kubelet knows the driver, after patience, or when ctx ends.
func (f *front) awaitRegistered(ctx context.Context, patience time.Duration) {
	select {
	case <-f.registered:
	case <-time.After(patience):
	case <-ctx.Done():
	}
}

// answerTime is how long the library may take to write metadata files and to answer after a method
// of the driver has returned. There is no event to wait for: it takes no stats handler, and its
// Stop cuts calls off (grpc.Server.Stop).
const answerTime = 100 * time.Millisecond

// close lets the calls that run finish, and has the kubelet forget the driver.
func (f *front) close() {
	f.closing.Do(func() {
		f.gate.Close()
		time.Sleep(answerTime)
		f.helper.Stop()
	})
}
